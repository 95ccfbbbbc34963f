"""Files of sentence-transformers that do not fit: the errors name the file."""

import json

import numpy as np
import pytest
import tiny_models as tiny
from model_folders import write_modules, write_settings

from fastattn import models
from fastattn.models import ModelError


@pytest.fixture
def folder(tmp_path):
    """The folder of a tiny BERT."""
    tiny.write(tmp_path, "bert")
    return tmp_path


TRANSFORMER = {"type": "sentence_transformers.Transformer", "path": ""}


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([], r"modules.json has no modules; expected Transformer and Pooling first, once each"),
        ({}, r"modules.json holds a dict; expected a list"),
        (["Transformer", "WeightedLayerPooling"], r"has a module 'WeightedLayerPooling'; expected one of Tr"),
        (["Transformer"], r"has Transformer; expected Transformer and Pooling first"),
        (["Transformer", "Normalize", "Pooling"], r"has Transformer, Normalize, Pooling; expected"),
        (["Transformer", "Pooling", "Pooling"], r"expected Transformer and Pooling first, once each"),
        ([{**TRANSFORMER, "path": "0_Trans"}], r"'path' of Transformer is '0_Trans'; expected ''"),
        ([3], r"has a module '3'; expected one of"),
        ([{"type": "custom_st.Transformer"}], r"has a module 'custom_st.Transformer'; expected one of sent"),
        ([{**TRANSFORMER, "kwargs": ["task"]}], r"'kwargs' of Transformer is \['task'\]; expected none"),
    ],
)  # fmt: skip
def test_modules_that_are_not_known(modules, message, folder):
    if isinstance(modules, list):
        modules = [
            {"type": f"sentence_transformers.{kind}", "path": "" if kind == "Transformer" else "1_Pooling"}
            if isinstance(kind, str) else kind for kind in modules
        ]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match=message):
        models.load(folder)


@pytest.mark.parametrize("path", ["", "..", ".", "../..", "/etc", "a/b", "1_Pooling/../..", None])
def test_a_module_outside_of_the_folder(path, folder):
    modules = [TRANSFORMER, {"type": "sentence_transformers.Pooling", "path": path}]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelError, match=r"modules.json: 'path' of Pooling is .*; expected a folder beside"):
        models.load(folder)


@pytest.mark.parametrize("mode", ["last", [], ["mean", "last"], 3, [["mean"]]])
def test_a_pooling_that_is_not_known(mode, folder):
    write_modules(folder, pooling={"pooling_mode": mode})
    with pytest.raises(ModelError, match=r"1_Pooling/config.json: 'pooling_mode' is .*; expected one or sev"):
        models.load(folder)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (("Dense", None), r"2_Dense/config.json is missing"),
        (("Dense", {"out_features": 3}), r"'in_features' is missing"),
        (("Dense", {"in_features": 9, "out_features": 3}), r"'in_features' is 9; expected 24, which the"),
        (("LayerNorm", {"dimension": 9}), r"'dimension' is 9; expected 24"),
        (("Dense", {"in_features": 24, "out_features": 3}), r"2_Dense/model.safetensors is missing"),
        (("Dense", {"in_features": 24, "out_features": 3, "activation_function": "torch.nn.PReLU"}),
            r"'activation_function' is 'torch.nn.PReLU'; expected one of Identity, Tanh"),
        (("Dense", {"in_features": 24, "out_features": 3, "module_input_name": "token_embeddings"}),
            r"'module_input_name' is 'token_embeddings'; only 'sentence_embedding' is supported"),
        (("Normalize", {"module_input_name": "token_embeddings"}), r"only 'sentence_embedding' is supported"),
        (("Dense", {"in_features": 24, "out_features": 3}, {"linear.weight": np.ones((3, 24), np.float32)}),
            r"'linear.bias' is missing"),
        (("Dense", {"in_features": 24, "out_features": 3, "bias": False},
            {"linear.weight": np.full((3, 24), np.nan, np.float32)}), r"values that are not finite"),
        (("LayerNorm", {"dimension": 24}, {"norm.weight": np.ones(23, np.float32)}), r"has shape \(23,\)"),
    ],
)  # fmt: skip
def test_modules_that_do_not_fit(module, message, folder):
    write_modules(folder, module)
    with pytest.raises(ModelError, match=message):
        models.load(folder)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"default_prompt_name": "other"},
            r"'default_prompt_name' is 'other'; expected one in 'prompts'",
        ),
        ({"default_prompt_name": ["query"]}, r"'default_prompt_name' is \['query'\]"),
        ({"prompts": {"query": 3}}, r"prompt 'query' is 3; expected a string"),
        ({"prompts": ["query"]}, r"'prompts' is \['query'\]; expected a table"),
        ({"similarity_fn_name": "maxsim"}, r"'similarity_fn_name' is 'maxsim'; expected one of cosine, dot"),
        ({"truncate_dim": 0}, r"'truncate_dim' is 0; expected an integer of at least 1"),
    ],
)
def test_settings_that_do_not_fit(values, message, folder):
    write_settings(folder, **values)
    with pytest.raises(ModelError, match=f"config_sentence_transformers.json: {message}"):
        models.load(folder)


def test_settings_of_the_transformer(folder):
    """Settings are read as sentence-transformers writes them, and as they stand elsewhere here."""
    write_modules(folder)
    text = {"method": "forward", "method_output_name": "last_hidden_state"}
    task = {"transformer_task": "feature-extraction", "module_output_name": "token_embeddings"}
    path = folder / "sentence_bert_config.json"
    for values in (
        {**task, "modality_config": {"text": text}},
        {"model_args": {"torch_dtype": "float16"}, "config_args": {"trust_remote_code": True}},
        {"processing_kwargs": {"text": {"padding": True}, "image": {"size": 3}}, "unpad_inputs": True},
        {"query_length": None, "model_kwargs": None},
    ):
        path.write_text(json.dumps(values))
        models.load(folder)


FORWARD = {"method": "forward", "method_output_name": "last_hidden_state"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"config_args": {"hidden_act": "relu"}}, "'config_args' has 'hidden_act'; expected none but "),
        ({"config_kwargs": {"hidden_act": "relu"}}, "'config_kwargs' has 'hidden_act'; expected none but "),
        ({"model_args": {"hidden_act": "relu"}}, "'model_args' has 'hidden_act'; expected none but "),
        ({"model_kwargs": ["hidden_act"]}, "'model_kwargs' is .*; expected a table"),
        ({"processor_kwargs": {"add_prefix_space": True}}, "'processor_kwargs' has 'add_prefix_space'"),
        ({"tokenizer_args": {"add_prefix_space": True}}, "'tokenizer_args' has 'add_prefix_space'"),
        ({"processing_kwargs": {"text": {"max_length": 9}}}, "'processing_kwargs' has 'max_length'"),
        ({"processing_kwargs": {"common": ["a"]}}, "'processing_kwargs' has .*; expected none but"),
        ({"modality_config": {"image": FORWARD}}, "'modality_config' has an unsupported 'text'; only"),
        ({"modality_config": {"text": {**FORWARD, "method_output_name": "pooler_output"}}}, ".*unsupported"),
        ({"modality_config": {"text": FORWARD, "message": {**FORWARD, "format": "flat"}}},
            "'modality_config' has 'message', with which texts go through a chat template; expected 'text'"),
        ({"modality_config": {"text": FORWARD}, "module_output_name": "sentence_embedding"},
            "'module_output_name' is 'sentence_embedding'; only 'token_embeddings' is supported"),
        ({"transformer_task": "fill-mask"}, "'transformer_task' is 'fill-mask'; only 'feature-extr"),
        ({"transformer_task": "retrieval"}, "'transformer_task' is 'retrieval'; expected one of feature-ext"),
        ({"query_length": 32}, "'query_length' is 32; expected none of this name"),
        ({"self": 1}, "'self' is 1; expected none of this name"),
        ({"tokenizer_name_or_path": "other"}, "'tokenizer_name_or_path' is 'other'; expected none of"),
    ],
)  # fmt: skip
def test_settings_of_the_transformer_that_are_refused(values, message, folder):
    write_modules(folder)
    (folder / "sentence_bert_config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match=f"sentence_bert_config.json: {message}"):
        models.load(folder)
