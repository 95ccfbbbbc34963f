"""Equal calls of sentence-transformers and of `fastattn.sentence_transformers`, on tiny models."""

import inspect
import warnings

import numpy as np
import pytest
import sentence_transformers
import torch
import transformers
from sentence_transformers.sentence_transformer import modules
from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling
from tiny_tokenizers import TEXTS, write_tokenizer
from transformers_folders import SIZES, randomised, save_tokenizer

from fastattn import sentence_transformers as ours
from fastattn.sentence_transformers._base import Options

TOLERANCE = 1e-5
PROMPTS = {"query": "the dog sat ", "passage": "a tree "}
CLASSES = ("SentenceTransformer", "CrossEncoder", "SparseEncoder")
pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder for each class, as sentence-transformers writes it, and one of three labels."""
    root = tmp_path_factory.mktemp("models")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = root / "base"
        base.mkdir()
        save_tokenizer(base)
        config = transformers.BertConfig(**SIZES)
        randomised(transformers.BertModel(config, add_pooling_layer=False)).save_pretrained(base)
        first = modules.Transformer(str(base), max_seq_length=32)
        parts = [
            first,
            modules.Pooling(48, "mean", include_prompt=False),
            randomised(modules.Dense(48, 20), 1),
        ]
        theirs = sentence_transformers.SentenceTransformer(modules=parts, device="cpu", prompts=PROMPTS)
        theirs.save_pretrained(str(root / "SentenceTransformer"), create_model_card=False)
        for name, labels in (("CrossEncoder", 1), ("labels", 3)):
            write_tokenizer(root / "base")
            config = transformers.BertConfig(**SIZES, num_labels=labels, type_vocab_size=2)
            model = transformers.BertForSequenceClassification(config)
            folder = root / name
            folder.mkdir()
            save_tokenizer(folder)
            randomised(model, 2).save_pretrained(folder)
        masked = root / "masked"
        masked.mkdir()
        save_tokenizer(masked)
        randomised(transformers.BertForMaskedLM(config), 3).save_pretrained(masked)
        theirs = sentence_transformers.SparseEncoder(
            modules=[MLMTransformer(str(masked), max_seq_length=30), SpladePooling("max")], device="cpu"
        )
        theirs.save_pretrained(str(root / "SparseEncoder"), create_model_card=False)
    return root


def both(folder, name=None, **options):
    """One constructor of both libraries."""
    classes = (getattr(each, name or folder.name) for each in (sentence_transformers, ours))
    return [each(str(folder), device="cpu", **options) for each in classes]


def plain(x):
    """Arrays for tensors and sparse ones, within lists and dicts."""
    if isinstance(x, dict):
        return {name: plain(value) for name, value in x.items()}
    if isinstance(x, list):
        return [plain(each) for each in x]
    if isinstance(x, torch.Tensor):
        return x.to_dense().numpy()
    return x.toarray() if hasattr(x, "toarray") else x


def require_same(got, expected):
    """Equal shapes and types, and numbers within the tolerance."""
    got, expected = plain(got), plain(expected)
    assert type(got) is type(expected)
    if isinstance(expected, dict):
        for name in got:
            require_same(got[name], expected[name])
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            require_same(one, other)
    elif isinstance(expected, str) or expected is None:
        assert got == expected
    else:
        assert np.shape(got) == np.shape(expected)
        if np.asarray(expected).dtype.kind in "iu":
            np.testing.assert_array_equal(got, expected)
        elif np.size(expected):
            bound = TOLERANCE * max(1, np.abs(expected).max())
            np.testing.assert_allclose(got, expected, rtol=0, atol=bound)


LONG = [*TEXTS, "the cat " * 40]
CALLS = {
    "one": ("the cat", {}),
    "several": (LONG, {}),
    "array": (np.array(TEXTS), {}),
    "none": ([], {}),
    "dicts": ([{"text": "the cat"}, "a dog"], {}),
    "dict": ({"text": "the cat"}, {}),
    "old-name": (None, {"sentences": TEXTS}),
    "prompt": (TEXTS, {"prompt": "the cat "}),
    "prompt-name": (TEXTS, {"prompt_name": "passage"}),
    "no-prompt": (TEXTS, {"prompt": ""}),
    "small-batches": (TEXTS, {"batch_size": 2, "show_progress_bar": False, "chunk_size": 3}),
    "normalized": (TEXTS, {"normalize_embeddings": True}),
    "truncated": (TEXTS, {"truncate_dim": 7, "normalize_embeddings": True}),
    "task": (TEXTS, {"task": "query"}),
    "tensor": (TEXTS, {"convert_to_tensor": True}),
    "one-tensor": ("the cat", {"convert_to_tensor": True}),
    "no-tensor": ([], {"convert_to_tensor": True}),
    "list": (TEXTS, {"convert_to_numpy": False}),
    "one-of-list": ("the cat", {"convert_to_numpy": False}),
    "binary": (TEXTS, {"precision": "binary"}),
    "ubinary": ("the cat", {"precision": "ubinary"}),
    "ubinary-tensor": (TEXTS, {"precision": "ubinary", "convert_to_tensor": True}),
}


@pytest.mark.parametrize("method", ["encode", "encode_query", "encode_document"])
@pytest.mark.parametrize("name", CALLS)
def test_encode(name, method, folders):
    inputs, options = CALLS[name]
    given = () if inputs is None else (inputs,)
    if method != "encode" and "task" in options:
        options = {}
    theirs, mine = both(folders / "SentenceTransformer")
    require_same(getattr(mine, method)(*given, **options), getattr(theirs, method)(*given, **options))


@pytest.fixture(scope="module")
def loaded(folders):
    return both(folders / "SentenceTransformer")


@pytest.mark.parametrize("precision", [None, "float32", "int8", "uint8", "binary", "ubinary"])
@pytest.mark.parametrize("inputs", [[], ["the cat", "a dog sat", ""]], ids=["none", "several"])
def test_types_of_results(inputs, precision, loaded):
    """Every way to convert, of no texts, too: types, dtypes and shapes."""
    for to_numpy in (True, False):
        for to_tensor in (True, False):
            for more in ({}, {"normalize_embeddings": True, "truncate_dim": 16}):
                how = {
                    "precision": precision,
                    "convert_to_numpy": to_numpy,
                    "convert_to_tensor": to_tensor,
                    **more,
                }
                expected, got = (each.encode(inputs, **how) for each in loaded)
                assert type(got) is type(expected)
                assert len(got) == len(expected)
                if len(inputs):
                    assert (got[0].dtype, got[0].shape) == (expected[0].dtype, expected[0].shape)


def test_prompts_that_are_set(loaded):
    """Documents get the first prompt that there is of theirs; a name that is not there is an error."""
    before = [each.prompts for each in loaded]
    for prompts in (
        {"document": "a ", "passage": "the "},
        {"passage": "the ", "corpus": "dog "},
        {"corpus": "dog "},
    ):
        for each in loaded:
            each.prompts = prompts
        theirs, mine = loaded
        require_same(mine.encode_document(TEXTS), theirs.encode_document(TEXTS))
        require_same(mine.encode_query(TEXTS), theirs.encode_query(TEXTS))
        for each in loaded:
            with pytest.raises(ValueError, match="query"):
                each.encode(TEXTS, prompt_name="query")
    for each, prompts in zip(loaded, before, strict=True):
        each.prompts = prompts


def test_settings(folders):
    """Arguments of the constructor, attributes that are set, and what is read again."""
    prompts = {"query": "a ", "mine": "the tree ", "none": None}
    how = {"prompts": prompts, "default_prompt_name": "mine", "truncate_dim": 11}
    for each in both(folders / "SentenceTransformer", **how, similarity_fn_name="dot"):
        assert each.prompts == {
            "query": "a ",
            "document": "",
            "mine": "the tree ",
            "passage": "a tree ",
            "none": "",
        }
        assert (each.default_prompt_name, each.truncate_dim, each.similarity_fn_name) == ("mine", 11, "dot")
        assert each.get_embedding_dimension() == each.get_sentence_embedding_dimension() == 11
        assert each.max_seq_length == each.get_max_seq_length() == 32
    theirs, mine = both(folders / "SentenceTransformer", **how)
    require_same(mine.encode(TEXTS), theirs.encode(TEXTS))
    for each in (theirs, mine):
        each.prompts["mine"], each.max_seq_length, each.truncate_dim = "", 5, None
        each.similarity_fn_name = sentence_transformers.SimilarityFunction.MANHATTAN
        assert each.similarity_fn_name == "manhattan"
        assert each.get_embedding_dimension() == 20
    require_same(mine.encode(LONG), theirs.encode(LONG))
    for each in (theirs, mine):
        each.set_pooling_include_prompt(True)
    require_same(mine.encode_document(LONG), theirs.encode_document(LONG))


@pytest.mark.parametrize("kind", ["cosine", "dot", "euclidean", "manhattan"])
def test_similarities(kind, folders):
    theirs, mine = both(folders / "SentenceTransformer", similarity_fn_name=kind)
    a, b = theirs.encode(TEXTS, convert_to_tensor=True), theirs.encode(TEXTS[::-1], convert_to_tensor=True)
    for name in ("similarity", "similarity_pairwise"):
        expected = getattr(theirs, name)(a, b)
        for x, y, kind in (
            (a, b, torch.Tensor),
            (list(a), list(b), torch.Tensor),
            (a.numpy(), b.numpy(), np.ndarray),
        ):
            got = getattr(mine, name)(x, y)
            assert isinstance(got, kind)
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_types_of_weights(folders):
    """Names and types of torch; bfloat16 is that of both within its rounding."""
    folder = folders / "SentenceTransformer"
    expected = both(folder)[1].encode(TEXTS)
    for dtype in ("auto", torch.float32, "float64"):
        mine = ours.SentenceTransformer(folder, model_kwargs={"torch_dtype": dtype, "device_map": "cpu"})
        np.testing.assert_allclose(mine.encode(TEXTS), expected, rtol=0, atol=1e-4)
    mine = ours.SentenceTransformer(folder, model_kwargs={"dtype": torch.bfloat16, "weights_dtype": "int8"})
    got = mine.encode(TEXTS)
    assert got.dtype == np.float32
    assert 1e-4 < np.abs(got - expected).max() < 0.1 * np.abs(expected).max()


PAIRS = [("the cat", "a dog"), ("a dog sat", "the cat " * 30), ("", "a tree"), ("the", "the")]
PREDICTS = {
    "pairs": (PAIRS, {}),
    "one": (PAIRS[0], {}),
    "array": (np.array(PAIRS), {}),
    "none": ([], {}),
    "softmax": (PAIRS, {"apply_softmax": True}),
    "tensor": (PAIRS, {"convert_to_tensor": True, "batch_size": 2}),
    "one-tensor": (PAIRS[0], {"convert_to_tensor": True}),
    "no-tensor": ([], {"convert_to_tensor": True}),
    "list": (PAIRS, {"convert_to_numpy": False}),
    "identity": (PAIRS, {"activation_fn": torch.nn.Identity()}),
    "function": (PAIRS, {"activation_fct": lambda x: torch.tanh(x) * 2}),
    "prompt": (PAIRS, {"prompt": "the dog "}),
}


@pytest.mark.parametrize("folder", ["CrossEncoder", "labels"])
@pytest.mark.parametrize("name", PREDICTS)
def test_predict(name, folder, folders):
    inputs, options = PREDICTS[name]
    theirs, mine = both(folders / folder, "CrossEncoder")
    got, expected = (each.predict(inputs, **options) for each in (mine, theirs))
    require_same(got, expected)
    if len(inputs) and not isinstance(got, list):
        assert got.dtype == expected.dtype


def test_rank_and_settings_of_cross_encoders(folders):
    documents = [*TEXTS, "the cat " * 30]
    theirs, mine = both(
        folders / "CrossEncoder", max_length=20, activation_fn=torch.nn.Identity(), num_labels=1
    )
    assert mine.num_labels == theirs.num_labels == 1
    assert mine.max_length == mine.max_seq_length == theirs.max_seq_length == 20
    for options in ({}, {"top_k": 3, "return_documents": True}, {"activation_fn": torch.nn.Tanh()}):
        got, expected = (each.rank("the dog", documents, **options) for each in (mine, theirs))
        require_same(got, expected)
    mine.activation_fn = theirs.activation_fn = torch.nn.Sigmoid()
    require_same(mine.predict(PAIRS), theirs.predict(PAIRS))
    with pytest.raises(ValueError, match=r"rank\(\)"):
        both(folders / "labels", "CrossEncoder")[1].rank("a", ["b"])


@pytest.mark.parametrize("options", [{}, {"max_active_dims": 3}, {"prompt": "the dog "}], ids=str)
def test_sparse(options, folders):
    theirs, mine = both(folders / "SparseEncoder")
    assert mine.get_embedding_dimension() == theirs.encode("a").shape[0]
    for inputs in (LONG, "the cat", []):
        for more in ({}, {"convert_to_sparse_tensor": False}, {"convert_to_tensor": False}):
            for method in ("encode", "encode_query", "encode_document"):
                got = getattr(mine, method)(inputs, **options, **{"convert_to_tensor": True, **more})
                expected = getattr(theirs, method)(inputs, **options, **more)
                if isinstance(expected, torch.Tensor):
                    assert got.is_sparse == expected.is_sparse
                require_same(got, expected)
                if not more and len(inputs):
                    require_same(getattr(mine, method)(inputs, **options), expected.to_dense().numpy())


def test_what_is_done_with_sparse_vectors(folders):
    theirs, mine = both(folders / "SparseEncoder", max_active_dims=5)
    tensors, sparse, one = theirs.encode(TEXTS), mine.encode(TEXTS), mine.encode("the cat")
    for x in (sparse, tensors, sparse.toarray()):
        require_same(mine.decode(x, top_k=2), theirs.decode(tensors, top_k=2))
    require_same(mine.decode(one), theirs.decode(theirs.encode("the cat")))


WRONG = {
    "precision": ("encode", (["a"],), {"precision": "int4"}),
    "prompt_name": ("encode", (["a"],), {"prompt_name": "x"}),
    "batch_size": ("encode", (["a"],), {"batch_size": 0}),
    "foo": ("encode", (["a"],), {"foo": 1}),
    "processing_kwargs": ("encode", (["a"],), {"processing_kwargs": {"text": {}, "x": {}}}),
    "role": ("encode", ([{"role": "user", "content": "a"}],), {}),
    "several": ("encode", (["a"],), {"precision": "int8"}),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_of_calls(name, folders):
    """The type of theirs, and a message that names the argument."""
    method, given, options = WRONG[name]
    theirs, mine = both(folders / "SentenceTransformer")
    if name != "processing_kwargs":  # theirs takes it
        with pytest.raises(ValueError):  # noqa: PT011
            getattr(theirs, method)(*given, **options)
    with pytest.raises(ValueError, match=rf"^{method}\(\): .*{name}"):
        getattr(mine, method)(*given, **options)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda"}, "device is 'cuda'; expected 'cpu'"),
        ({"modules": [1]}, "modules is given; expected none"),
        ({"config_kwargs": {"x": 1}}, "config_kwargs is given; expected none"),
        ({"model_card_data": 1}, "model_card_data is given; expected none"),
        ({"backend": "onnx"}, "backend is 'onnx'; expected "),
        ({"model_kwargs": {"file_name": "x"}}, "model_kwargs has 'file_name'; expected one of activations, "),
        ({"model_kwargs": {"dtype": "float16"}}, "dtype of model_kwargs is 'float16'; expected "),
        ({"processor_kwargs": {"x": 1}}, "processor_kwargs has 'x'; expected 'model_max_length'"),
        ({"default_prompt_name": "x"}, "default_prompt_name is 'x'; expected "),
        ({"revision": "x"}, "revision is given for the path"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_errors_of_constructors(options, message, name, folders):
    with pytest.raises(ValueError, match=rf"^{name}\(\): .*{message}"):
        getattr(ours, name)(str(folders / name), **options)


def test_other_errors(folders):
    folder = folders / "SentenceTransformer"
    with pytest.raises(ValueError, match=r"similarity_fn_name is 'x'; expected"):
        ours.SentenceTransformer(folder, similarity_fn_name="x")
    with pytest.raises(ValueError, match=r"SentenceTransformer\(\): .* is CrossEncoder; expected Encoder or"):
        ours.SentenceTransformer(folders / "CrossEncoder")
    with pytest.raises(ValueError, match=r"num_labels is 2; expected 1"):
        ours.CrossEncoder(folders / "CrossEncoder", num_labels=2)
    with pytest.raises(ValueError, match=r"keep_in_fp32_modules is given"):
        ours.CrossEncoder(folders / "CrossEncoder", keep_in_fp32_modules=["x"])
    with pytest.raises(TypeError, match=r"model_name_or_path is of type NoneType"):
        ours.SentenceTransformer()
    with pytest.raises(TypeError, match=r"SentenceTransformer\(\): foo is not an argument"):
        ours.SentenceTransformer(folder, foo=1)
    with pytest.raises(TypeError, match=r"encode\(\): sentences is inputs; expected one"):
        ours.SentenceTransformer(folder).encode(inputs=TEXTS, sentences=TEXTS)


def arguments(function):
    parameters = inspect.signature(inspect.unwrap(function)).parameters.values()
    return {p.name: p.default for p in parameters if p.kind != p.VAR_KEYWORD and p.name != "self"}


@pytest.mark.parametrize("name", CLASSES)
def test_signatures(name):
    """All arguments of theirs, with their defaults, in their order."""
    theirs, mine = (getattr(each, name) for each in (sentence_transformers, ours))
    here = {*arguments(mine.__init__), *Options.__annotations__, "use_auth_token"}
    assert set(arguments(theirs.__init__)) - here == set()
    for method in ("encode", "predict", "rank"):
        if hasattr(theirs, method) and (name != "CrossEncoder" or method != "encode"):
            expected, got = (arguments(getattr(each, method)) for each in (theirs, mine))
            got = {key: value for key, value in got.items() if key in expected}
            assert list(got) == list(expected)
            differ = {key for key in got if got[key] != expected[key]}
            assert differ == ({"convert_to_tensor"} if name == "SparseEncoder" else set())
