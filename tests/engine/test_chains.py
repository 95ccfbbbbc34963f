"""Steps between two attentions, block of rows by block of rows: the bits of the steps one by one."""

import pickle
import sys
import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import tiny_models as tiny
from implementations import COMPILED, each_isa, forced
from sizes import forced_sizes
from tiny_models import DECODERS, ENCODERS, VOCAB

from fastattn import layers, models
from fastattn._engine import program, settings
from fastattn._engine.steps import OUT, AddStep, NormStep, Sequences, X
from fastattn.positions import rope_frequencies

needs_kernels = pytest.mark.skipif(not COMPILED, reason="of compiled kernels, and there are none")
BFLOAT16 = pytest.importorskip("ml_dtypes").bfloat16
NARROW = {"weights_dtype": "int8", "activations": "int8"}
ROWS = 24  # of a task, the least


@pytest.fixture
def ran(monkeypatch):
    """Rows of a task of each program that ran by chains."""
    rows, found = [], settings.core.chain_rows if COMPILED else None

    def spy(*args):
        rows.append(found(*args))
        return rows[-1]

    if COMPILED:
        monkeypatch.setattr(settings.core, "chain_rows", spy)
    return rows


def both_ways(call, ran, threads=1):
    """The bits of a call by chains, with several blocks, and step by step."""
    with settings.forced(num_threads=threads), forced_sizes(chain_rows=ROWS):
        chained = np.array(call())
    assert ROWS >= max(ran) > 0
    with forced_sizes(chain_rows=0):
        alone = np.array(call())
    return chained.view(np.uint8), alone.view(np.uint8)


@pytest.mark.parametrize("options", [{}, NARROW, {"dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize("kind", [*ENCODERS, *DECODERS])
@needs_kernels
def test_a_model_has_the_bits_of_its_steps(kind, options, tmp_path, ran):
    tiny.write(tmp_path, kind)
    model = models.load(tmp_path, **options)
    lengths = (16, 11, 14, 15)  # of a ragged batch
    rng = np.random.default_rng(0)
    ids, mask = rng.integers(2, VOCAB, (4, 16)), np.arange(16) < np.array(lengths)[:, None]
    if kind in DECODERS:
        prompts = [row[:n].tolist() for row, n in zip(ids, lengths, strict=True)]
        np.testing.assert_array_equal(*both_ways(lambda: list(model.generate(prompts, 3, stop=())), ran))
        chained, alone = both_ways(lambda: model(ids), ran, threads=2)
    else:
        chained, alone = both_ways(lambda: model(ids, mask), ran, threads=2)
    np.testing.assert_array_equal(chained, alone)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@each_isa
def test_a_layer_has_the_bits_of_its_steps(isa, dtype, threads, norm_first, ran):
    rng, dtype = np.random.default_rng(0), BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    layer = layers.TransformerEncoderLayer(96, 3, 130, "gelu", norm_first=norm_first, rng=rng)
    x = rng.standard_normal((3, 47, 96)).astype(dtype)
    with forced(isa):
        chained, alone = both_ways(lambda: layer(x), ran, threads)
    np.testing.assert_array_equal(chained, alone)


def norm(x, out, n=8):
    return NormStep(x, out, "layer_norm", np.ones(n, np.float32), None, 1e-5)


def test_buffers_of_a_chain_are_its_own_if_nobody_else_reads_them():
    """`a` is written and read in the chain alone, `b` is read by what follows it, which runs in Python."""

    class Elsewhere(AddStep):
        op = None

    steps = [
        norm(X, "a"),
        norm("a", "b"),
        AddStep("b", "b", "a", 8),
        Elsewhere("b", "c", "b", 8),
        norm("c", OUT),
    ]
    built = program.build("test", steps)
    (chain,) = built.layouts[1].chains
    assert (chain.begin, chain.end, chain.own) == (0, 3, {"a": 8})
    assert set(built.layouts[1].places) == {"b", "c"}
    assert set(built.layouts[0].places) == {"a", "b", "c"}


def test_blocks_of_rows_do_not_share_what_steps_in_turn_may():
    """One block writes `c` while another one still reads `b`: only step by step they may lie in one place."""

    class Along(AddStep):
        along = True

    first, last = Along(X, "b", X, 8), Along("c", OUT, "c", 8)
    built = program.build("test", [first, norm("b", "a"), norm("a", "c"), last])
    assert built.layouts[0].places["b"] == built.layouts[0].places["c"]
    assert sorted(built.layouts[1].places.values()) == [(0, 8), (8, 8)]


@needs_kernels
def test_few_rows_large_buffers_and_large_weights_go_step_by_step():
    core = settings.core
    with forced_sizes(chain_rows=96, chain_bytes=1 << 20):
        assert core.chain_rows(4096, 1 << 12, 1 << 20, 2) == 94  # 44 tasks
        assert core.chain_rows(192, 1 << 12, 1 << 20, 2) == 96
        assert core.chain_rows(128, 1 << 12, 1 << 20, 2) == 64
        assert core.chain_rows(4096, 1 << 14, 1 << 20, 2) == 64
        assert core.chain_rows(4096, 0, 0, 2) == 94
        assert core.chain_rows(47, 1 << 12, 1 << 20, 2) == 0
        assert core.chain_rows(4096, 1 << 15, 1 << 20, 2) == 0
        assert core.chain_rows(4096, 1 << 12, (1 << 24) + 1, 2) == 0
    with forced_sizes(chain_rows=0):
        assert core.chain_rows(4096, 1 << 12, 1 << 20, 2) == 0


@pytest.mark.parametrize("kind", ["bert", "modernbert", "t5"])
def test_what_lies_between_products_of_int8_may_be_shorter(kind, tmp_path):
    """Projections, what attention gives, and hidden features; no residual, and nothing of other products."""
    tiny.write(tmp_path, kind)
    built = models.load(tmp_path, **NARROW).program
    attends = [step for step in built.steps if step.op == "attend"]
    wide = {step.out for step in built.steps if getattr(step, "activation", None)}
    assert built.between == {step.x for step in attends} | {step.out for step in attends} | wide
    residuals = {step.residual for step in built.steps if getattr(step, "residual", None)}
    assert residuals
    assert not built.between & (residuals | {X, OUT})
    assert not models.load(tmp_path, weights_dtype="int8").program.between
    assert pickle.loads(pickle.dumps(built)).between == built.between


def test_programs_that_others_have_to_equal_are_exact(tmp_path):
    """A cache, and a layer's steps one by one, give the same bits."""
    tiny.write(tmp_path, "llama")
    assert not models.load(tmp_path, **NARROW).program.between
    assert not program.build("test", models.load(tmp_path, **NARROW).program.steps).between


@each_isa
@pytest.mark.parametrize("more", [{"rope": layers.Rope(rope_frequencies(16))}, {"qk_norm": True}, {}])
def test_layers_keep_their_bits_where_others_are_longer(isa, more):
    """Padded calls with rotations or norms of heads run step by step, all others as programs."""
    rng = np.random.default_rng(0)
    make = partial(layers.TransformerEncoderLayer, 64, 4, 96, "gelu", rng=rng, attention=more, **NARROW)
    encoder, x = layers.TransformerEncoder([make(), make()]), rng.standard_normal((2, 40, 64), np.float32)
    padding = np.arange(40) >= np.array([[25], [40]])
    with forced(isa):
        whole = encoder(x, src_key_padding_mask=padding)
        np.testing.assert_array_equal(encoder(x[:1, :25]), whole[:1, :25])
        np.testing.assert_array_equal(encoder(x[1:]), whole[1:])


@needs_kernels
def test_shorter_buffers_add_little_to_the_error(tmp_path):
    tiny.write(tmp_path, "bert")
    ids = np.random.default_rng(0).integers(2, VOCAB, (8, 16))
    exact, model = models.load(tmp_path, dtype="float64")(ids), models.load(tmp_path, **NARROW)
    got = model(ids)
    longer = replace(model, program=replace(model.program, rounds=False))(ids)
    assert np.abs(got - exact).mean() < 1.05 * np.abs(longer - exact).mean()
    if settings.core.get_isa() in ("avx512bf16", "amx"):
        assert not np.array_equal(got, longer)


def test_a_program_of_other_steps_has_their_weights():
    """Where the first one was compiled, by chains or step by step, before it was replaced."""
    x = np.random.default_rng(0).standard_normal((48, 8), dtype=np.float32)
    call, steps = Sequences(1), [norm(X, "a"), norm("a", OUT)]
    first = program.build("test", steps)
    for rows in (x, x[:1]):
        once = first.run(rows, call)
        second = replace(first, steps=(steps[0], replace(steps[1], weight=np.full(8, 2, np.float32))))
        np.testing.assert_array_equal(second.run(rows, call), 2 * once)
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(second)).run(rows, call), 2 * once)


def test_threads_that_make_the_first_call_together_compile_it_once_each(tmp_path):
    """A program's steps overwrite its input: twice in a row they would give something else."""
    tiny.write(tmp_path, "bert")
    ids, before = np.random.default_rng(0).integers(2, VOCAB, (4, 16)), sys.getswitchinterval()
    expected, together = models.load(tmp_path)(ids), threading.Barrier(4)
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(10):
            model, found = models.load(tmp_path), []

            def call(model=model, found=found):
                together.wait()
                found.append(model(ids))

            threads = [threading.Thread(target=call) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for result in (*found, model(ids)):
                np.testing.assert_array_equal(result, expected)
    finally:
        sys.setswitchinterval(before)
