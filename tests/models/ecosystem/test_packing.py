"""Sequences packed into rows do not see each other, whatever else a model is told."""

import contextlib

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import modeling_flash_attention_utils as flash

from delta_trn import DeltaConfig, DeltaForCausalLM, check_packing, patch_transformers
from delta_trn.backends.parity.judge import error
from delta_trn.models.cache import CACHE_NAME
from delta_trn.models.ecosystem import patching
from delta_trn.models.sequence import sequence_bounds
from tests.support.families import FAMILIES, INDEXED, make, tokens
from tests.support.tiny_models import assert_same
from tests.support.tiny_models import model as tiny_model


def test_packed_sequences_do_not_see_each_other_however_the_model_is_told(packing_model):
    with patch_transformers(packing_model, backend="chunked"):
        report = check_packing(packing_model, lengths=(5, 64, 1, 20))
    assert report and not report.refused, str(report)
    assert {"default cache", "padding", "numbered mask"} < {row.way for row in report.sequences}


def test_indexed_attention_refuses_packed_sequences():
    model, ids = make(INDEXED), tokens(1, 20)
    places = torch.tensor([[*range(7), *range(13)]])
    with patch_transformers(model, backend="chunked"), torch.no_grad():
        alone = model(ids, position_ids=torch.arange(20)[None]).logits
        assert torch.equal(alone, model(ids).logits)
        for told in ({"position_ids": places}, {"cu_seq_lens_q": torch.tensor([0, 7, 20])}):
            with pytest.raises(ValueError, match="indexed attention reads a row as one sequence"):
                model(ids, use_cache=False, **told)
        with pytest.MonkeyPatch.context() as patched:
            # then nobody may ask a tensor
            patched.setattr(torch.compiler, "is_compiling", lambda: True)
            assert torch.equal(model(ids, position_ids=torch.arange(20)[None]).logits, alone)
            with pytest.raises(RuntimeError, match="one sequence per row"):
                model(ids, use_cache=False, position_ids=places)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_places_of_three_axes_keep_sequences_apart(family):
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    }
    model = make(family, rope_parameters={**rope, "partial_rotary_factor": 1.0})
    assert not check_packing(model, lengths=(5, 64, 1), by="three axes")
    with patch_transformers(model, backend="chunked"):
        report = check_packing(model, lengths=(5, 64, 1), by="three axes")
    assert report, str(report)


def test_packing_without_the_patch_is_shown_to_leak(model):
    report = check_packing(model, lengths=(5, 64, 1, 20))
    assert (
        not report and "sees its neighbors" in str(report) and "told by position_ids" in str(report)
    )


def test_attention_gets_the_three_axes_of_images_behind_the_places_of_text():
    """Of four axes, text, time, height and width, the first is the text's; all four differ."""
    text = torch.tensor([[0, 1, 2, 0, 1, 2]])
    image = torch.stack([text + 10, text + 20, text + 30])
    for axes in (image, torch.cat([text[None] + 40, image])):
        told = patching._tell_attention({"position_ids": axes}, text)["position_ids"]
        assert torch.equal(told, torch.cat([text[None], image]))


@pytest.mark.parametrize(("leak", "found"), [(1, False), (20, True)], ids=["rounding", "a leak"])
def test_a_leak_of_some_roundings_is_found(leak, found):
    """What stands before a sequence is let in by as much as `leak` times what rounding changes."""
    model = tiny_model(dtype=torch.float32)
    report = check_packing(model, lengths=(5, 64, 1), by="cu_seqlens")
    assert report
    rounding, whole = (
        max(getattr(x, name) for x in report.sequences) for name in ("rounding", "leak")
    )

    def let_in(module, arguments, options, output):
        if options.pop("cu_seqlens", None) is not None:
            unaware = module(**options).logits
            output.logits = output.logits + leak * rounding / whole * (unaware - output.logits)

    model.register_forward_hook(let_in, with_kwargs=True)
    assert bool(check_packing(model, lengths=(5, 64, 1), by="cu_seqlens")) != found


def test_a_packed_row_beside_a_padded_one_and_padding_on_either_side_are_kept_apart(packing_model):
    ids = tokens(2, 20)
    places = torch.tensor([[*range(7), *range(13)], [0, 0, *range(14), *range(4)]])
    mask = torch.ones_like(ids)
    mask[1, :2] = mask[1, 16:] = 0
    with torch.no_grad(), patch_transformers(packing_model, backend="chunked"):
        packed = packing_model(ids, position_ids=places, attention_mask=mask).logits
        for row, cut in ((0, slice(7)), (0, slice(7, 20)), (1, slice(2, 16))):
            assert (
                error(packed[row, cut], packing_model(ids[row : row + 1, cut]).logits[0]) < 2**-16
            )


def attend(q, k, v, causal=False, softmax_scale=None, dropout_p=0.0):
    """Stands in for flash_attn_func: rows [B, T, H, D], each of one sequence."""
    heads = (x.transpose(1, 2) for x in (q, k, v))
    causal = causal and q.shape[1] > 1
    o = scaled_dot_product_attention(*heads, is_causal=causal, scale=softmax_scale, enable_gqa=True)
    return o.transpose(1, 2)


def attend_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
    """Stands in for flash_attn_varlen_func: [tokens, H, D],
    sequences end to end between the bounds.
    """
    lengths = cu_seqlens_q.diff().tolist()
    assert torch.equal(cu_seqlens_q, cu_seqlens_k) and cu_seqlens_q.dtype == torch.int32
    assert sum(lengths) == len(q) and max(lengths) <= min(max_seqlen_q, max_seqlen_k)
    parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    return torch.cat([attend(*(x[None] for x in part), **options)[0] for part in parts])


def replace_flash_attention(monkeypatch):
    """Gives transformers' own code for flash attention, which reads what a model is told,
    two stand-ins.
    """
    functions = attend, attend_packed, None, flash._pad_input, flash._unpad_input
    monkeypatch.setattr(flash, "_lazy_imports", lambda *words, **options: functions)
    monkeypatch.setattr(flash, "_loaded_implementation", None)
    monkeypatch.setattr(flash.logger, "warning_once", lambda *words: None)


@pytest.fixture
def flash_attention(monkeypatch):
    replace_flash_attention(monkeypatch)


def compute(model, attention, ids, **options):
    model.config._attn_implementation = attention
    with torch.no_grad():
        return model(ids, use_cache=False, **options).logits


@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if name not in ("qwen4_exp", INDEXED)]
)
def test_flash_attention_is_told_of_packed_sequences_as_other_attention_is(family, flash_attention):
    """Sparse attention of Qwen4-exp and GLM-5 Next is their own,
    without flash attention in transformers.
    """
    model, ids = make(family), tokens(2, 20)
    places = torch.tensor([[*range(7), *range(13)], [*range(12), *range(8)]])
    with patch_transformers(model, backend="chunked"):
        expected = compute(model, "sdpa", ids, position_ids=places)
        found = compute(model, "flash_attention_2", ids, position_ids=places)
        assert (
            error(found, expected) < 2**-16 < error(found, compute(model, "flash_attention_2", ids))
        )
        report = check_packing(model, lengths=(5, 64, 1, 20))
    assert report and not report.refused, str(report)


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_compiled_flash_attention_keeps_a_packed_row_apart_and_refuses_several(
    flash_attention, rows
):
    """transformers, which cannot look at positions then,
    took each of several rows for one sequence.
    """
    model, ids, places = (
        make("qwen3_5"),
        tokens(rows, 20),
        torch.tensor([[*range(7), *range(13)]] * rows),
    )
    with patch_transformers(model, backend="chunked"):
        expected = compute(model, "sdpa", ids, position_ids=places)
        try:
            model.compile(backend="eager", fullgraph=rows == 2)
            if rows == 2:
                with pytest.raises(Exception, match="flash attention reads each of several rows"):
                    compute(model, "flash_attention_2", ids, position_ids=places)
            else:
                found = compute(model, "flash_attention_2", ids, position_ids=places)
                assert error(found, expected) < 2**-16
        finally:
            torch.compiler.reset()


@pytest.mark.parametrize("rows", [1, 2])
def test_packed_sequences_cannot_fill_or_continue_a_cache(qwen, rows):
    """The last row alone is packed."""
    ids, places = tokens(rows, 6), torch.arange(6, 12).repeat(rows, 1)
    places[-1] = torch.tensor([6, 7, 0, 1, 2, 3])
    with patch_transformers(qwen, backend="chunked"):
        cache = qwen(ids, use_cache=True)[CACHE_NAME]
        for options in ({CACHE_NAME: cache}, {"use_cache": True}):
            with pytest.raises(ValueError, match="Pass use_cache=False, or one sequence per row"):
                qwen(ids, position_ids=places, **options)
        assert cache.get_seq_length() == 6


def test_our_models_keep_packed_sequences_apart_however_they_are_told():
    torch.manual_seed(0)
    model = DeltaForCausalLM(DeltaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2))
    report = check_packing(model)
    assert report and not report.refused, str(report)
    with pytest.raises(ValueError, match="name one of position_ids"):
        check_packing(model, by="positions")  # type: ignore[arg-type]


def test_a_padded_row_of_our_model_is_packed_too(ours):
    ids = tokens(2, 12)
    places = torch.tensor([[*range(4), *range(6), 6, 7], [0, 0, *range(10)]])
    mask = torch.ones_like(ids)
    mask[0, 10:] = mask[1, :2] = 0
    with torch.no_grad():
        packed = ours(ids, position_ids=places, attention_mask=mask).logits
        for row, cut in ((0, slice(4)), (0, slice(4, 10)), (1, slice(2, 12))):
            assert_same(packed[row, cut], ours(ids[row : row + 1, cut]).logits[0])


def test_rows_of_packed_sequences_equal_the_sequences(qwen):
    """Two rows, each of which holds two sequences."""
    ids = tokens(2, 20)
    places = torch.tensor([[*range(7), *range(13)], [*range(15), *range(5)]])
    with torch.no_grad(), patch_transformers(qwen, backend="chunked"):
        packed = qwen(ids, position_ids=places, use_cache=False).logits
        for row, cut in ((0, 7), (1, 15)):
            parts = [
                qwen(part[None], use_cache=False).logits[0]
                for part in (ids[row, :cut], ids[row, cut:])
            ]
            assert error(packed[row], torch.cat(parts)) < 2**-16


def test_bounds_come_from_places_that_start_again():
    assert sequence_bounds(torch.tensor([[0, 1, 0, 1, 2]])).tolist() == [0, 2, 5]
    assert sequence_bounds(torch.tensor([[0, 1], [0, 0]])).tolist() == [0, 2, 3, 4]
    assert sequence_bounds(torch.tensor([[[0, 1, 0]], [[0, 6, 0]]])).tolist() == [0, 2, 3]
    assert sequence_bounds(torch.tensor([[[0, 0, 1, 0]], [[0, 1, 2, 0]]])).tolist() == [0, 3, 4]
    text = torch.tensor([0, 1, 0, 1])
    assert sequence_bounds(torch.stack([text, *(text + 7,) * 3])[:, None]).tolist() == [0, 2, 4]
    for single in ([[0, 1, 2]], [[0]], [[7, 8]]):
        assert sequence_bounds(torch.tensor(single)) is None


def test_lengths_that_cannot_show_a_leak_are_refused(qwen):
    with pytest.raises(ValueError, match="at least two sequences"):
        check_packing(qwen, lengths=[5])


def test_a_model_whose_tokens_do_not_see_each_other_proves_nothing():
    model = DeltaForCausalLM(DeltaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=1))
    with torch.no_grad():
        model.model.blocks[0].mixer.o_proj.weight.zero_()
    with pytest.raises(ValueError, match="trained"):
        check_packing(model)


@pytest.mark.parametrize("name", ["ours", "qwen3_next", "kimi_linear"])
def test_places_that_contradict_bounds_are_refused(name, ours):
    """Places of a row, and 0s of padding, contradict nothing."""
    ids, bounds = tokens(1, 20), torch.tensor([0, 7, 20])
    agree, other = ([*range(n), *range(20 - n)] for n in (7, 9))
    padded = [*range(7), *range(8), *[0] * 5]

    def call(model, places, **options):
        told = "cu_seqlens" if name == "ours" else "cu_seq_lens_q"
        options |= {told: bounds, "position_ids": torch.tensor([places])}
        return model(ids, use_cache=False, **options).logits

    model = ours if name == "ours" else make(name)
    with torch.no_grad(), contextlib.ExitStack() as patched:
        if name != "ours":
            patched.enter_context(patch_transformers(model, backend="chunked"))
        expected = call(model, agree)
        for places in ([*range(20)], padded):
            assert torch.equal(call(model, places), expected)
        with pytest.raises(ValueError, match="go from 8 to 0 at token 9 of row 0, within"):
            call(model, other)
        if name == "ours":
            call(model, agree, cu_seq_lens_q=bounds.int())
            with pytest.raises(ValueError, match="two names of one argument"):
                call(model, agree, cu_seq_lens_q=torch.tensor([0, 9, 20]))
        with pytest.MonkeyPatch.context() as compiling:  # then nobody may ask a tensor
            compiling.setattr(torch.compiler, "is_compiling", lambda: True)
            with pytest.raises(RuntimeError, match="start again"):
                call(model, other)
