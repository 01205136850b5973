"""Whatever tells of packed sequences is checked, and read alike by every layer of a model."""

from contextlib import nullcontext

import pytest
import torch

from delta_trn import patch_transformers
from delta_trn.backends.parity.judge import error
from delta_trn.models import sequence
from delta_trn.models.cache import CACHE_NAME
from delta_trn.models.sequence import packed_bounds, packed_places, sequence_bounds
from tests.support.families import make, tokens
from tests.support.tiny_models import model as tiny

T = 24
LENGTHS = (10, 14)
# bounds that are none, and how they are refused
WRONG_BOUNDS = {
    "no 0": ([10, 24], r"runs from 10 to 24; it must run from 0 to the number of tokens, 24"),
    "lengths": ([10, 14], "runs from 10 to 14; .*the running sum of the lengths"),
    "below 0": ([-1, 10, 24], "runs from -1 to 24"),
    "no end": ([0, 10], "runs from 0 to 10"),
    "beyond": ([0, 10, 25], "runs from 0 to 25"),
    "falling": ([0, 15, 10, 24], "falls from 15 at 1 to 10 at 2"),
    "one": ([3], r"torch.int64 \(1,\), expected int64 \[N \+ 1\]"),
    "none": ([], r"\(0,\), expected int64 \[N \+ 1\]"),
}
# what has another form
WRONG_FORMS = {
    "bounds in a list": ({"cu_seq_lens_q": [0, 10, 24]}, "cu_seq_lens_q is a list; pass an int64"),
    "bounds of two axes": ({"cu_seq_lens_q": torch.tensor([[0, 24]])}, r"is torch.int64 \(1, 2\)"),
    "bounds of floats": ({"cu_seq_lens_q": torch.tensor([0.0, 24.0])}, "is torch.float32"),
    "places in a list": ({"position_ids": [*range(T)]}, "position_ids is a list; pass an int64"),
    "places of one axis": ({"position_ids": torch.arange(T)}, r"\(24,\), expected \(1, 24\)"),
    "fewer places": ({"position_ids": torch.arange(T - 1)[None]}, r"\(1, 23\), expected"),
    "more rows": ({"position_ids": torch.arange(T).expand(3, -1)}, r"\(3, 24\), expected"),
    "numbers in a list": ({"seq_idx": [0] * T}, "seq_idx is a list"),
    "numbers of one axis": ({"seq_idx": torch.zeros(T).int()}, r"seq_idx is \(24,\), expected"),
}
OURS = {"attention_layers": [1], "dtype": torch.float32}


def subject(whose):
    return tiny(**OURS) if whose == "ours" else make("qwen3_next")


def patched(whose, model):
    return nullcontext() if whose == "ours" else patch_transformers(model, backend="chunked")


def is_refused(model, told, words, ids=None):
    """Calls the model with and without labels."""
    ids = tokens(1, T) if ids is None else ids
    for labels in ({}, {"labels": ids}):
        with pytest.raises((TypeError, ValueError), match=words):
            model(ids, use_cache=False, **labels, **told)


class TestBounds:
    @pytest.mark.parametrize("whose", ["ours", "theirs"])
    def test_impossible_bounds_are_refused(self, whose):
        model = subject(whose)
        with patched(whose, model):
            for numbers, words in WRONG_BOUNDS.values():
                bounds = torch.tensor(numbers, dtype=torch.int64)
                is_refused(model, {"cu_seq_lens_q": bounds}, f"cu_seq_lens_q .*{words}")
                if whose == "ours":
                    is_refused(model, {"cu_seqlens": bounds}, f"cu_seqlens .*{words}")

    @pytest.mark.parametrize("whose", ["ours", "theirs"])
    def test_what_has_another_form_is_refused_by_name(self, whose):
        model = subject(whose)
        with patched(whose, model):
            for told, words in WRONG_FORMS.values():
                is_refused(model, told, words)
            rows = tokens(2, T)
            is_refused(model, {"cu_seq_lens_q": torch.tensor([0, T])}, "tokens, 48", rows)
            model(rows, use_cache=False, cu_seq_lens_q=torch.tensor([0, 10, 2 * T]))
            model(rows, use_cache=False, position_ids=torch.arange(T)[None])

    def test_a_list_as_cu_seqlens_is_refused_by_name(self):
        is_refused(tiny(**OURS), {"cu_seqlens": [0, 24]}, "cu_seqlens is a list; pass an int64")
        is_refused(tiny(**OURS), {"cu_seqlens": []}, "cu_seqlens is a list; pass an int64")

    @pytest.mark.parametrize("whose", ["ours", "theirs"])
    def test_their_numbers_are_read_once_a_batch_and_not_in_every_layer(self, whose, monkeypatch):
        changes = {"num_hidden_layers": 4} | ({} if whose == "ours" else {"layer_types": None})
        model = tiny(**OURS | changes) if whose == "ours" else make("qwen3_next", **changes)
        read, check = [], sequence._check_numbers
        monkeypatch.setattr(
            sequence, "_check_numbers", lambda *words: (read.append(words), check(*words))
        )
        with patched(whose, model), torch.no_grad():
            model(tokens(1, T), use_cache=False, cu_seq_lens_q=torch.tensor([0, 10, T]))
        assert len(read) == 1

    def test_a_graph_that_is_captured_asserts_them_without_waiting(self, monkeypatch):
        model, right = tiny(**OURS), torch.tensor([0, 10, T])
        expected = model(tokens(1, T), cu_seqlens=right).logits
        monkeypatch.setattr(sequence, "_is_captured", lambda x: True)
        monkeypatch.setattr(sequence, "_check_numbers", None)
        assert torch.equal(model(tokens(1, T), cu_seqlens=right).logits, expected)
        for numbers, _ in list(WRONG_BOUNDS.values())[:6]:
            with pytest.raises(RuntimeError, match="cu_seqlens must rise from 0 to the number of"):
                model(tokens(1, T), cu_seqlens=torch.tensor(numbers))

    @pytest.mark.parametrize("whose", ["ours", "theirs"])
    def test_a_compiled_model_asserts_them(self, whose):
        name = "cu_seqlens" if whose == "ours" else "cu_seq_lens_q"
        model = subject(whose) if whose == "ours" else make("qwen3_5")
        right = torch.tensor([0, 10, T])
        with patched(whose, model), torch.no_grad():
            expected = model(tokens(1, T), use_cache=False, **{name: right}).logits
            try:
                compiled = torch.compile(model, backend="eager", fullgraph=True)
                found = compiled(tokens(1, T), use_cache=False, **{name: right}).logits
                assert error(found, expected) < 2**-16
                for numbers in ([10, 14, 24], [0, 15, 10], [0, 15, 25], [0, 25, 24]):
                    wrong = {name: torch.tensor(numbers)}
                    with pytest.raises(RuntimeError, match=f"{name} must rise from 0"):
                        compiled(tokens(1, T), use_cache=False, **wrong)
            finally:
                torch.compiler.reset()


def block_mask(lengths=LENGTHS, dtype=torch.bool):
    """Returns the usual mask of packed sequences for attention, [1, 1, T, T]."""
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    allowed = (numbers[:, None] == numbers).tril()[None, None]
    if dtype == torch.bool:
        return allowed
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)


# what tells of sequences of 10 and 14 tokens
PLACES = {
    "from 0": [*range(10), *range(14)],
    "from 1": [*range(1, 11), *range(1, 15)],
    "a later piece": [*range(10), *range(5, 19)],
    "an earlier and a later piece": [*range(7, 17), *range(40, 54)],
}


def is_apart(model, **told):
    ids = tokens(1, T)
    with torch.no_grad():
        found = model(ids, use_cache=False, **told).logits[0]
        alone = [model(x, use_cache=False).logits[0] for x in ids.split(LENGTHS, dim=1)]
        together = model(ids, use_cache=False).logits[0]
    assert error(together, torch.cat(alone)) > 2**-6
    assert error(found, torch.cat(alone)) < 2**-16


class TestEveryLayer:
    @pytest.mark.parametrize("way", PLACES)
    def test_a_sequence_begins_where_places_do_not_go_on(self, packing_model, way):
        places = torch.tensor([PLACES[way]])
        with patch_transformers(packing_model, backend="chunked"):
            is_apart(packing_model, position_ids=places)

    @pytest.mark.parametrize("way", PLACES)
    def test_so_it_does_in_our_models(self, way):
        is_apart(tiny(**OURS), position_ids=torch.tensor([PLACES[way]]))

    def test_and_where_the_text_axis_of_four_does_not(self):
        rope = {"mrope_section": [3, 3, 2], "mrope_interleaved": True, "rope_type": "default"}
        rope |= {"rope_theta": 1e4, "partial_rotary_factor": 1.0}
        model, text = make("qwen3_5", rope_parameters=rope), torch.tensor(PLACES["from 1"])
        with patch_transformers(model, backend="chunked"):
            is_apart(model, position_ids=text.expand(4, 1, -1))

    def test_places_with_padding(self):
        """Padding between two tokens of a sequence may be counted or not."""
        real = torch.tensor([[1, 1, 0, 1, 1, 1, 0]]).bool()
        for places, bounds in (
            ([0, 1, 1, 2, 3, 4, 1], None),
            ([0, 1, 2, 3, 4, 5, 6], None),
            ([0, 1, 0, 2, 3, 4, 0], None),
            ([7, 8, 0, 9, 10, 11, 0], None),
            ([0, 1, 0, 0, 1, 2, 0], [0, 2, 3, 6, 7]),
            ([0, 1, 1, 2, 7, 8, 1], [0, 2, 3, 4, 6, 7]),
            ([3, 4, 1, 1, 2, 3, 1], [0, 2, 3, 6, 7]),
        ):
            found = sequence_bounds(torch.tensor([places]), real)
            assert (None if found is None else found.tolist()) == bounds, places

    def test_three_axes_of_an_image_are_no_sequences(self):
        image = [[0, 1, 2, 2, 2, 2, 5], [0, 1, 2, 2, 3, 3, 5], [0, 1, 2, 3, 2, 3, 5]]
        axes = torch.tensor(image)[:, None]
        assert sequence_bounds(axes) is None
        assert sequence_bounds(torch.cat([torch.arange(7).expand(1, 1, -1), axes])) is None
        assert sequence_bounds(torch.cat([axes, axes], -1)).tolist() == [0, 7, 14]

    def test_steps_of_tokens_that_continue_a_cache_are_left_alone(self, qwen):
        ids, places = tokens(1, 12), torch.tensor([[8, 9, 9, 10]])
        with torch.no_grad(), patch_transformers(qwen, backend="chunked"):
            logits = []
            for given in ({"position_ids": torch.arange(8, 12)[None]}, {"position_ids": places}):
                cache = qwen(ids[:, :8], use_cache=True)[CACHE_NAME]
                logits.append(qwen(ids[:, 8:], **{CACHE_NAME: cache}, **given).logits[0, :2])
        assert torch.equal(*logits)


class TestMasksOfAttention:
    @pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_linear"])
    @pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
    def test_a_mask_of_blocks_alone_keeps_them_apart_in_every_layer(self, family, dtype):
        model, mask = make(family), block_mask(dtype=dtype)
        with patch_transformers(model, backend="chunked"):
            is_apart(model, attention_mask=mask)
            is_apart(model, attention_mask=mask, position_ids=torch.arange(T)[None])
            is_apart(model, attention_mask=mask, position_ids=torch.tensor([PLACES["from 1"]]))
            is_apart(model, attention_mask=mask, cu_seq_lens_q=torch.tensor([0, 10, T]))

    def test_a_dict_of_masks_is_read_too(self, qwen):
        masks = {"full_attention": block_mask(), "linear_attention": None}
        with patch_transformers(qwen, backend="chunked"):
            is_apart(qwen, attention_mask=masks)

    def test_a_compiled_model_reads_it(self):
        model, mask = make("qwen3_5"), block_mask()
        with patch_transformers(model, backend="chunked"):
            model.compile(backend="eager", fullgraph=True)
            try:
                is_apart(model, attention_mask=mask)
                with pytest.raises(RuntimeError, match="across the beginning of its sequence"):
                    is_apart(model, attention_mask=mask[..., torch.randperm(T)].tril())
            finally:
                torch.compiler.reset()

    def test_masks_of_one_sequence_are_read_so(self, qwen):
        ids, causal = tokens(1, T), torch.ones(1, 1, T, T).bool().tril()
        windowed, prefix = causal.triu(-3), causal.clone()
        prefix[..., :5, :5] = True
        with torch.no_grad(), patch_transformers(qwen, backend="chunked"):
            expected = qwen(ids, use_cache=False).logits
            assert error(qwen(ids, use_cache=False, attention_mask=causal).logits, expected) < 1e-5
            assert qwen(ids, attention_mask=causal, use_cache=True)[CACHE_NAME] is not None
        for mask in (causal, windowed, prefix):
            assert packed_bounds({}, mask, (1, T)) is None

    def test_padding_of_a_mask_is_apart_whether_it_sees_nothing_or_all(self):
        for seen in (False, True):
            mask = block_mask((3, 12, 9))
            mask[..., :3, :] = mask[..., 20:23, :] = seen
            mask[..., 3:, :3] = mask[..., 23:, :] = False
            bounds = packed_bounds({}, mask, (1, T))
            assert bounds is not None and {0, 3, 15} <= set(bounds.tolist())
            assert not {4, 5, 14, 16, 19} & set(bounds.tolist())

    def test_blocks_of_flex_attention_are_read(self):
        from torch.nn.attention.flex_attention import create_block_mask

        numbers = torch.arange(2).repeat_interleave(torch.tensor(LENGTHS))
        block = lambda b, h, q, k: (numbers[q] == numbers[k]) & (k <= q)  # noqa: E731
        mask = create_block_mask(block, 1, None, T, T, device="cpu")
        assert packed_bounds({}, mask, (1, T)).tolist() == [0, 10, 24]

    def test_masks_that_a_state_cannot_follow_are_refused(self, qwen):
        turns = (torch.arange(T)[:, None] % 2 == torch.arange(T) % 2).tril()[None, None]
        causal = torch.ones(1, 1, T, T).bool().tril()
        places, bounds = torch.tensor([PLACES["from 0"]]), torch.tensor([0, 10, T])
        with patch_transformers(qwen, backend="chunked"):
            for told in (
                {"attention_mask": turns},
                {"attention_mask": causal, "position_ids": places},
                {"attention_mask": causal, "cu_seq_lens_q": bounds},
            ):
                with pytest.raises(ValueError, match="across the beginning of its sequence"):
                    qwen(tokens(1, T), use_cache=False, **told)
            with pytest.raises(ValueError, match=r"is torch.int64 \(1, 1, 24, 24\); with four"):
                qwen(tokens(1, T), use_cache=False, attention_mask=block_mask().long())
            with pytest.raises(ValueError, match="cannot fill or continue a cache"):
                qwen(tokens(1, T), use_cache=True, attention_mask=block_mask())

    def test_places_of_blocks_are_found_while_torch_compile_traces(self):
        places, is_packed = packed_places({}, block_mask(dtype=torch.float16), (1, T))
        assert is_packed and places[0].tolist() == PLACES["from 0"]

    def test_our_models_refuse_them_whatever_else_they_are_told(self):
        for told in ({}, {"position_ids": torch.tensor([PLACES["from 0"]])}):
            is_refused(
                tiny(**OURS), told | {"attention_mask": block_mask()}, r"\(1, 1, 24, 24\); pass"
            )
        is_refused(tiny(**OURS), {"attention_mask": [[1] * T]}, "attention_mask is a list; pass")
