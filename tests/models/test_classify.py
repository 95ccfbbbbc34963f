"""Heads that score pairs of texts, texts and tokens: their definition, bits, and what is refused."""

import json
import math
import pickle

import numpy as np
import pytest
import tiny_models as tiny
from implementations import assert_same_rows, each_isa, forced
from model_folders import change_config, refused, write_settings
from tiny_tokenizers import WORDS, write_tokenizer

from fastattn import models
from fastattn.models import CrossEncoder, Encoder, _encode_calls

PAIRS = [
    ("the cat sat", "a dog ran on the mat"),
    ("a tree", "the cat"),
    ("the dog " * 6, "a mat"),
    ("", ""),
    ("on the mat a dog sat", "a tree ran on the cat on the mat on a dog"),
]
NAMES = {"bert": "Bert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert"}
RNG = np.random.default_rng(3)


def write(folder, kind="bert", task="SequenceClassification", labels=1, types=2, **changes):
    """A tiny encoder with a head of random weights, which are returned."""
    base = "bert" if kind == "bert" else "roberta"
    changes = {
        "type_vocab_size": types,
        "architectures": [f"{NAMES[kind]}For{task}"],
        "id2label": {str(i): f"kind {i}" for i in range(labels)},
        **changes,
    }
    weights = tiny.tensors(base, {**tiny.CONFIGS[base], **changes})
    heads = {"pooler.dense": 24, "classifier": labels}
    if base == "roberta":
        heads = {"classifier.dense": 24, "classifier.out_proj": labels}
    for name, n_out in heads.items():
        weights[f"{name}.weight"] = 0.3 * RNG.standard_normal((n_out, 24), np.float32)
        weights[f"{name}.bias"] = 0.3 * RNG.standard_normal(n_out, np.float32)
    stored = {name if name.startswith("classifier") else f"{base}.{name}": x for name, x in weights.items()}
    tiny.write(folder, base, stored, **changes, model_type=kind)
    write_tokenizer(folder)
    return weights


def tokens_of(pair):
    """Ids and token types, by the tokenizer's definition; nothing is cut."""
    first, second = ([WORDS.index(word) for word in text.split()] for text in pair)
    return [1, *first, 2, *second, 2], [0] * (len(first) + 2) + [1] * (len(second) + 1)


def logits_of(model, weights, pair):
    """The head's definition on the encoder's hidden states, in float64."""
    ids, types = tokens_of(pair)
    first = model.encoder(ids, token_type_ids=[types])[0, 0].astype(np.float64)
    inner, outer = ("pooler.dense", "classifier")
    if "classifier.dense.weight" in weights:
        inner, outer = ("classifier.dense", "classifier.out_proj")
    inner = np.tanh(weights[f"{inner}.weight"] @ first + weights[f"{inner}.bias"])
    return weights[f"{outer}.weight"] @ inner + weights[f"{outer}.bias"]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    return np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("kind", NAMES)
def test_scores_by_their_definition(kind, labels, tmp_path, implementation):
    weights = write(tmp_path, kind, labels=labels)
    model = models.load(tmp_path)
    assert isinstance(model, CrossEncoder)
    assert model.num_labels == labels
    assert model.labels == tuple(f"kind {i}" for i in range(labels))
    logits = np.array([logits_of(model, weights, pair) for pair in PAIRS])
    expected = sigmoid(logits[:, 0]) if labels == 1 else logits
    got = model.predict(PAIRS)
    assert got.dtype == np.float32
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    expected = expected if labels == 1 else softmax(logits)
    np.testing.assert_allclose(model.predict(PAIRS, apply_softmax=True), expected, rtol=1e-5, atol=1e-5)


def test_max_seq_length_is_that_of_pairs(tmp_path):
    write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 8}')
    cut = models.load(tmp_path)
    assert cut.max_seq_length == 8
    (tmp_path / "tokenizer_config.json").unlink()
    model = models.load(tmp_path)
    model.max_seq_length = 8
    assert model.max_seq_length == 8
    np.testing.assert_array_equal(model.predict(PAIRS), cut.predict(PAIRS))
    with pytest.raises(ValueError, match=r"^CrossEncoder\(\): max_seq_length is 3; expected 4 to"):
        model.max_seq_length = 3  # the special tokens of a pair
    for name in ("labels", "activation", "no_such_field"):
        with pytest.raises(AttributeError, match=rf"^CrossEncoder.{name} cannot be set: .* max_seq_length c"):
            setattr(model, name, None)


def _gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


FAMILIES = {  # the names of the inner map and of the outer one, and what is between them
    "mpnet": ("classifier.dense", "classifier.out_proj", np.tanh),
    "distilbert": ("pre_classifier", "classifier", lambda x: np.maximum(x, 0)),
    "albert": ("albert.pooler", "classifier", np.tanh),
    "deberta-v2": ("pooler.dense", "classifier", _gelu),
    "modernbert": ("head.dense", "classifier", _gelu),
    "gte": ("pooler.dense", "classifier", np.tanh),
    "new": ("pooler.dense", "classifier", np.tanh),
    "nomic_bert": ("pooler.dense", "classifier", np.tanh),
}


@pytest.mark.parametrize(("kind", "pooling"), [*((kind, "cls") for kind in FAMILIES), ("modernbert", "mean")])
def test_heads_of_other_families(kind, pooling, tmp_path, implementation):
    inner, outer, function = FAMILIES[kind]
    changes = {"architectures": ["AnyForSequenceClassification"], "classifier_pooling": pooling}
    changes["id2label"] = {"0": "no", "1": "yes"}
    changes |= {"norm_eps": 1e-2} if kind == "modernbert" else {}
    weights = tiny.tensors(kind, {**tiny.CONFIGS[kind], **changes})
    head = {f"{inner}.weight": (24, 24), f"{outer}.weight": (2, 24), f"{outer}.bias": (2,)}
    head |= {"head.norm.weight": (24,)} if kind == "modernbert" else {f"{inner}.bias": (24,)}
    head = {name: 0.3 * RNG.standard_normal(shape, np.float32) for name, shape in head.items()}
    prefix = "albert." if kind == "albert" else ""
    tiny.write(tmp_path, kind, {**{prefix + name: x for name, x in weights.items()}, **head}, **changes)
    model = models.load(tmp_path)
    ids, mask = np.array([[1, 7, 5, 2, 0], [1, 5, 6, 7, 2]]), [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    states = model.encoder(ids, mask).astype(np.float64)
    x = states[:, 0] if pooling == "cls" else states.sum(axis=1) / [[4], [5]]
    x = function(x @ head[f"{inner}.weight"].T + head.get(f"{inner}.bias", 0))
    if kind == "modernbert":
        x = x - x.mean(axis=1, keepdims=True)
        x = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-2) * head["head.norm.weight"]
    expected = x @ head[f"{outer}.weight"].T + head[f"{outer}.bias"]
    np.testing.assert_allclose(model(ids, mask), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_heads_of_decoders_score_the_last_token(kind, tmp_path, implementation):
    changes = {"architectures": ["AnyForSequenceClassification"], "id2label": {"0": "no", "1": "yes"}}
    weights = {**tiny.tensors(kind, {**tiny.CONFIGS[kind], **changes})}
    score = weights["score.weight"] = 0.3 * RNG.standard_normal((2, 24), np.float32)
    tiny.write(tmp_path, kind, weights, **changes)
    model = models.load(tmp_path)
    assert isinstance(model, CrossEncoder)
    ids, mask = np.array([[1, 7, 5, 2, 0], [1, 5, 6, 7, 2]]), [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    states = model.encoder(ids, mask).astype(np.float64)
    np.testing.assert_allclose(model(ids, mask), states[[0, 1], [3, 4]] @ score.T, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(model(ids[1:]), model(ids, mask)[1:], rtol=1e-5, atol=1e-6)
    tiny.write(tmp_path, kind, weights | {"score.bias": score[:, 0]}, **changes)
    refused(tmp_path, "'score.bias' is not known")
    change_config(tmp_path, architectures=["AnyForTokenClassification"])
    assert isinstance(models.load(tmp_path), models.Decoder)


def test_a_call_takes_ids(tmp_path):
    write(tmp_path, labels=3)
    model = models.load(tmp_path)
    expected = model.predict(PAIRS)
    tokens = [tokens_of(pair) for pair in PAIRS]
    longest = max(len(ids) for ids, _ in tokens)
    for side in (1, -1):  # padding on the right, and on the left
        ids, types, mask = np.zeros((3, len(PAIRS), longest), np.int64)
        for i, (own, kinds) in enumerate(tokens):
            at = slice(len(own)) if side == 1 else slice(longest - len(own), None)
            ids[i, at], types[i, at], mask[i, at] = own, kinds, 1
        assert_same_rows(model(ids, mask, types), expected)
    assert_same_rows(model(tokens[0][0], token_type_ids=[tokens[0][1]]), expected[:1])
    assert model(np.zeros((0, 4), np.int64)).shape == (0, 3)
    assert model(np.zeros((2, 0), np.int64)).shape == (2, 3)


@each_isa
def test_bits_do_not_depend_on_company(isa, tmp_path, monkeypatch):
    write(tmp_path, labels=3)
    with forced(isa):
        model = models.load(tmp_path)
        pairs = [*PAIRS, *(tuple(reversed(pair)) for pair in PAIRS)] * 3
        expected = model.predict(pairs)
        for batch_size in (1, 2, 7, 100):
            np.testing.assert_array_equal(model.predict(pairs, batch_size=batch_size), expected)
        for pair, scores in zip(pairs, expected, strict=True):
            np.testing.assert_array_equal(model.predict(pair), scores)
        monkeypatch.setattr(_encode_calls, "_CALL_TOKENS", 40)
        np.testing.assert_array_equal(model.predict(pairs), expected)


def test_forms_of_inputs(tmp_path):
    write(tmp_path)
    model = models.load(tmp_path)
    expected = model.predict(PAIRS)
    for inputs in (iter(PAIRS), [list(pair) for pair in PAIRS], np.array(PAIRS), tuple(PAIRS)):
        assert_same_rows(model.predict(inputs), expected)
    for pair in (PAIRS[0], list(PAIRS[0]), np.array(PAIRS[0])):
        score = model.predict(pair)
        assert score.shape == ()
        assert score == expected[0]
    alone = model.predict([("the cat",), ("the cat", "a dog"), ("a dog",)])
    for one in ("the cat", ("the cat",)):
        assert_same_rows(model.predict(one), alone[0])
    logits = model.predict([("the cat",)], activation_fn=lambda x: x)
    assert_same_rows(model(model.text.encode(["the cat"]))[:, 0], logits)
    assert model.predict([]).shape == (0,)
    assert model.predict(iter(())).dtype == np.float32


def test_the_longer_text_is_cut_first(tmp_path):
    write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 8}))
    model = models.load(tmp_path)
    got = model.predict([("the cat", "a dog ran on the mat"), ("a dog ran on the mat", "the cat")])
    assert_same_rows(got, model.predict([("the cat", "a dog ran"), ("a dog ran", "the cat")]))


def test_rank(tmp_path):
    write(tmp_path)
    model = models.load(tmp_path)
    documents = [second for _, second in PAIRS]
    scores = model.predict([("the cat", document) for document in documents])
    order = np.argsort(-scores, kind="stable").tolist()
    assert len(set(scores.tolist())) > 3
    expected = [{"corpus_id": i, "score": float(scores[i])} for i in order]
    assert model.rank("the cat", documents) == expected
    assert model.rank("the cat", iter(documents), top_k=2) == expected[:2]
    for found, each in zip(model.rank("the cat", documents, top_k=100, batch_size=1), expected, strict=True):
        assert found == pytest.approx(each, rel=1e-5)
    with_text = model.rank("the cat", documents, return_documents=True)
    assert with_text == [{**each, "text": documents[each["corpus_id"]]} for each in expected]
    assert model.rank("the cat", []) == []
    same = model.rank("the cat", ["a dog"] * 3)
    assert [each["corpus_id"] for each in same] == [0, 1, 2]
    turned = model.rank("the cat", documents, activation_fn=lambda x: -x)
    assert [each["corpus_id"] for each in turned] == order[::-1]


def test_prompts(tmp_path):
    write(tmp_path)
    settings = {"default_prompt_name": "rank", "model_type": "CrossEncoder"}
    write_settings(tmp_path, prompts={"rank": "the dog "}, **settings)
    model = models.load(tmp_path)
    plain = model.predict(PAIRS, prompt="")
    expected = model.predict([("the dog " + first, second) for first, second in PAIRS], prompt="")
    assert (plain != expected).any()
    assert_same_rows(model.predict(PAIRS), expected)
    assert_same_rows(model.predict(PAIRS, prompt_name="rank"), expected)
    assert_same_rows(model.predict(PAIRS, prompt_name="query"), plain)
    assert model.rank("cat", ["a"]) == model.rank("the dog cat", ["a"], prompt="")


def test_token_types_are_left_out_where_the_folder_says_so(tmp_path):
    write(tmp_path)
    model = models.load(tmp_path)
    typed = model.predict(PAIRS)
    config = tmp_path / "tokenizer_config.json"
    for values, same in (
        ({"tokenizer_class": "BertTokenizer"}, True),
        ({"model_input_names": ["input_ids", "token_type_ids"]}, True),
        ({"model_input_names": ["input_ids", "attention_mask"]}, False),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, False),
    ):
        config.write_text(json.dumps(values))
        assert np.array_equal(models.load(tmp_path).predict(PAIRS), typed) == same
    write(tmp_path, "roberta", types=1)
    assert np.isfinite(models.load(tmp_path).predict(PAIRS)).all()


FUNCTIONS = {
    "torch.nn.modules.linear.Identity": lambda x: x,
    "torch.nn.modules.activation.Sigmoid": sigmoid,
    "torch.nn.Tanh": np.tanh,
    "torch.nn.modules.activation.ReLU": lambda x: np.maximum(x, 0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_activations_of_the_folder(name, tmp_path, implementation):
    write(tmp_path, labels=2)
    logits = models.load(tmp_path).predict(PAIRS)
    expected = FUNCTIONS[name](logits.astype(np.float64))
    old, inner = {"sbert_ce_default_activation_function": name}, {"activation_fn": name}
    for config, own in (
        (old, {}),
        ({"sentence_transformers": inner, "sbert_ce_default_activation_function": "x"}, {}),
        ({"sentence_transformers": {"activation_fn": "x"}}, inner),
    ):
        change_config(tmp_path, **config)
        write_settings(tmp_path, **own)
        np.testing.assert_allclose(models.load(tmp_path).predict(PAIRS), expected, rtol=1e-6, atol=1e-6)


def test_an_activation_of_the_caller(tmp_path):
    write(tmp_path, labels=2)
    model = models.load(tmp_path)
    logits = model.predict(PAIRS)
    np.testing.assert_array_equal(model.predict(PAIRS, activation_fn=np.square), logits**2)
    with pytest.raises(ValueError, match=r"predict\(\): activation_fn returned float32 of shape \(5,\); exp"):
        model.predict(PAIRS, activation_fn=lambda x: x[:, 0])


@pytest.mark.parametrize("types", [("float64", None), ("float32", "int8"), ("bfloat16", None)])
def test_other_types(types, tmp_path):
    write(tmp_path, labels=2)
    expected = models.load(tmp_path).predict(PAIRS)
    dtype, weights_dtype = types
    model = models.load(tmp_path, dtype=dtype, weights_dtype=weights_dtype)
    got = model.predict(PAIRS)
    assert got.dtype == ("float64" if dtype == "float64" else "float32")
    assert 0 < np.abs(got - expected).max() < (1e-5 if dtype == "float64" else 0.2)


def test_what_a_folder_becomes(tmp_path):
    write(tmp_path)
    copy = pickle.loads(pickle.dumps(models.load(tmp_path)))
    np.testing.assert_array_equal(copy.predict(PAIRS), models.load(tmp_path).predict(PAIRS))
    assert repr(copy) == "<bert: 2 layers of 24, float32; CrossEncoder of 1>"
    modules = [{"type": "sentence_transformers.Transformer", "path": ""}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    refused(tmp_path, "modules.json has Transformer; expected Transformer and Pooling first")
    write_settings(tmp_path, model_type="CrossEncoder")
    assert isinstance(models.load(tmp_path), CrossEncoder)
    pooling = {"type": "sentence_transformers.Pooling", "path": "1_Pooling"}
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text("{}")
    write_settings(tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps([*modules, pooling]))
    assert isinstance(models.load(tmp_path), Encoder)
    (tmp_path / "modules.json").unlink()
    for architectures in (["BertModel"], ["BertForMaskedLM"], "BertForSequenceClassification", [3], []):
        change_config(tmp_path, architectures=architectures)
        assert isinstance(models.load(tmp_path), Encoder)
    write_settings(tmp_path, model_type="CrossEncoder")
    refused(tmp_path, "'architectures' is []", "is one of a CrossEncoder; expected one that ends with For")


def test_labels(tmp_path):
    write(tmp_path, labels=2)
    change_config(tmp_path, id2label=None)
    assert models.load(tmp_path).labels == ("LABEL_0", "LABEL_1")
    change_config(tmp_path, num_labels=3)
    refused(tmp_path, "'classifier.weight' has shape (2, 24); expected (3, 24)")
    change_config(tmp_path, id2label=[1])
    refused(tmp_path, "'id2label' is [1]; expected a table")


def test_heads_that_do_not_fit(tmp_path):
    weights = write(tmp_path)
    for change, *parts in (
        ({"pooler.dense.bias": None}, "'pooler.dense.bias' is missing"),
        ({"classifier.weight": None, "classifier.bias": None}, "'classifier.weight' is missing; 'cl"),
        ({"classifier.weight": np.ones((2, 24), np.float32)}, "'classifier.weight' has shape (2, 24)"),
        ({"classifier.other": np.ones(3, np.float32)}, "'classifier.other' is not known"),
        ({"classifier.bias": np.full(1, np.nan, np.float32)}, "'classifier.bias' has values that are not"),
    ):  # fmt: skip
        changed = {name: x for name, x in {**weights, **change}.items() if x is not None}
        config = json.loads((tmp_path / "config.json").read_text())
        tiny.write(tmp_path, "bert", changed, **config)
        refused(tmp_path, "model.safetensors", *parts)
    write(tmp_path)
    write_settings(tmp_path, activation_fn="my.Function")
    refused(tmp_path, "config_sentence_transformers.json: 'activation_fn' is 'my.Function'; expected one of")


WRONG = [
    ({"inputs": 3}, TypeError, r"predict\(\): inputs is of type int; expected pairs, as \[\(text, text\)\]"),
    ({"inputs": {("a", "b")}}, TypeError, r"inputs is of type set; expected pairs"),
    ({"inputs": {"a": "b"}}, TypeError, r"inputs is of type dict; expected pairs"),
    ({"inputs": [3]}, TypeError, r"inputs\[0\] is 3; expected a pair, as \(text, text\)"),
    ({"inputs": [("a", 3)]}, TypeError, r"inputs\[0\]\[1\] is 3; expected a string"),
    ({"inputs": [("a", "b"), "c"]}, TypeError, r"inputs\[1\] is 'c'; expected a pair"),
    ({"inputs": [("a", "b", "c")]}, ValueError, r"inputs\[0\] has 3 texts; expected a pair"),
    ({"inputs": ["a", "b", "c"]}, ValueError, r"inputs has 3 texts; expected a pair"),
    ({"inputs": [()]}, ValueError, r"inputs\[0\] has 0 texts"),
    ({"inputs": [("a", "\ud800")]}, ValueError, r"half of a surrogate pair; expected whole"),
    ({"batch_size": 0}, ValueError, r"predict\(\): batch_size is 0; expected at least 1"),
    ({"activation_fn": "sigmoid"}, TypeError, r"activation_fn is 'sigmoid'; expected a function"),
    ({"apply_softmax": "yes"}, TypeError, r"apply_softmax is 'yes'"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG)
def test_wrong_arguments(changes, error, message, tmp_path):
    write(tmp_path)
    (tmp_path / "tokenizer.json").unlink()  # nothing is read before all is checked
    with pytest.raises(error, match=message):
        models.load(tmp_path).predict(**{"inputs": PAIRS, **changes})


def test_wrong_arguments_of_rank(tmp_path):
    write(tmp_path)
    model = models.load(tmp_path)
    for changes, error, message in (
        ({"query": ["a"]}, TypeError, r"rank\(\): query is \['a'\]; expected a string"),
        ({"documents": "a"}, TypeError, r"rank\(\): documents is of type str"),
        ({"documents": {"a", "b"}}, TypeError, r"rank\(\): documents is of type set"),
        ({"documents": [3]}, TypeError, r"rank\(\): documents\[0\] is 3; expected a string"),
        ({"top_k": 0}, ValueError, r"rank\(\): top_k is 0; expected at least 1"),
        ({"activation_fn": "sigmoid"}, TypeError, r"^rank\(\): activation_fn is 'sigmoid'; expected a func"),
        ({"return_documents": 2}, TypeError, r"rank\(\): return_documents is 2"),
    ):
        with pytest.raises(error, match=message):
            model.rank(**{"query": "a", "documents": ["b"], **changes})
    write(tmp_path, labels=2)
    with pytest.raises(ValueError, match=r"rank\(\): the model has 2 labels; expected one: use predict"):
        models.load(tmp_path).rank("a", ["b"])


def test_types_that_the_model_does_not_have(tmp_path):
    write(tmp_path, types=3)
    text = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text.replace('"type_id": 1', '"type_id": 3'))
    message = r"tokenizer.json gives a token the type 3; expected one of the model's 3, which begin with 0"
    with pytest.raises(models.ModelError, match=message):
        models.load(tmp_path).predict(PAIRS)
