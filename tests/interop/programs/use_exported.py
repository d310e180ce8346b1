"""Loads exported models by transformers alone, compares their outputs and saves them again.

Usage: use_exported.py FOLDER...; each has `inputs.pt`, and gets the folders `saved_*` beside it.
"""

import os
import pickle
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["HF_HUB_OFFLINE"] = "1"
# An import of protlm fails.
sys.modules["protlm"] = None  # pyright: ignore[reportArgumentType]

import torch  # noqa: E402
from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import (  # noqa: E402
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertModel,
    EsmForMaskedLM,
    EsmModel,
    GPT2Model,
    RobertaModel,
    T5EncoderModel,
    Trainer,
    TrainingArguments,
    XLNetModel,
    pipeline,
)

TOLERANCE = 1e-5
# What harnesses choose by the name of a tokenizer, and others with a vocabulary.
OTHERS = (EsmModel, EsmForMaskedLM, BertModel, RobertaModel, T5EncoderModel, GPT2Model, XLNetModel)
OPTIONAL = re.compile(r"(esm\.)?(contact_head|pooler|lm_head)\.")


def compare(name: str, found: Tensor, expected: Tensor) -> None:
    error = float((found - expected).detach().abs().max())
    assert error <= TOLERANCE, f"{name} differ by {error}"


def assert_refused(says: str, call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as error:
        assert says in str(error), error
    else:
        raise AssertionError(f"not refused: {says}")


def check(folder: Path, *, with_misuse: bool) -> None:
    """Loads a model by each class, and compares it."""
    inputs = torch.load(folder / "inputs.pt")
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    tokens = tokenizer(inputs["sequences"], padding=True, return_tensors="pt")
    assert torch.equal(tokens["input_ids"], inputs["tokens"]), tokens["input_ids"]
    head = AutoModelForCausalLM if inputs["causal"] else AutoModelForMaskedLM
    for auto in (AutoModel, head):
        loaded: Any = auto.from_pretrained(
            folder,
            trust_remote_code=True,
            output_loading_info=True,
            local_files_only=True,
            attn_implementation="eager",
        )
        model, info = loaded
        # The contact head may be missing; the bare ESM has a pooler, and no head.
        wrong = {kind: [x for x in names if not OPTIONAL.match(x)] for kind, names in info.items()}
        assert not any(wrong.values()), wrong
        assert not model.training
        with torch.no_grad():
            out = run(model, tokens, inputs)
        if auto is head:
            compare("logits", out.logits[inputs["mask"]], inputs["logits"])
            with torch.no_grad():
                compare("losses", model(**tokens, labels=inputs["labels"]).loss, inputs["loss"])
        if hasattr(model, "network"):
            check_embeddings(model, tokens)
            check_inputs(model, tokens)
        model.save_pretrained(folder / f"saved_{auto.__name__}")
        if with_misuse:
            check_misuse(folder / f"saved_{auto.__name__}", model, tokens)
            check_misuse(folder, model, tokens)
            tokenizer.save_pretrained(folder / "tokenizer")
            again = AutoTokenizer.from_pretrained(folder / "tokenizer", trust_remote_code=True)
            assert type(again).__name__ == type(tokenizer).__name__ == "ProtlmTokenizer"
            assert again("mkJ*")["input_ids"] == tokenizer("MKX")["input_ids"]
    if hasattr(model, "network"):
        check_labels(folder, tokens, inputs)
        check_precision(folder, model, tokens)
    if hasattr(model, "network") and inputs["causal"]:
        check_causal(folder, tokenizer, tokens, inputs)
    if with_misuse:
        check_training(folder, tokenizer, tokens)
    print(folder.name, "good")


def check_embeddings(model: Any, tokens: Any) -> None:
    """Embeddings are the input in place of their tokens, if nothing else needs these."""
    given = {**tokens, "inputs_embeds": model.get_input_embeddings()(tokens["input_ids"])}
    del given["input_ids"]
    if model.config.protlm["model"]["value_embedding"]:
        assert_refused("embeds tokens in its layers", partial(model, **given))
    else:
        compare("outputs of embeddings", model(**given)[0], model(**tokens)[0])


def check_inputs(model: Any, tokens: Any) -> None:
    """Inputs of collators that change nothing are read, others refused; outputs may be a tuple."""
    zeros_BL, width = torch.zeros_like(tokens["input_ids"]), tokens["input_ids"].shape[1]
    position_1L = torch.arange(width)[None]
    # Positions at padding are of no effect.
    shown_BL = torch.where(tokens["attention_mask"] > 0, position_1L, 1)
    expected = model(**tokens)[0]
    for ids in (position_1L, shown_BL):
        found = model(**tokens, position_ids=ids, token_type_ids=zeros_BL, return_dict=False)
        assert type(found) is tuple and torch.equal(found[0], expected)
    for name, wrong in (
        ("position_ids", position_1L + 1),
        ("position_ids", position_1L[:, 1:]),
        ("token_type_ids", zeros_BL + 1),
    ):
        assert_refused(f"{name} must be", partial(model, **tokens, **{name: wrong}))
    with mock.patch("torch.compiler.is_compiling", return_value=True):
        found = model(**tokens, token_type_ids=zeros_BL + 1)
    compare("outputs in a compiler", found[0], expected)
    # A plain forward keeps one hidden state.
    network = model.network
    with mock.patch.object(network, "forward", wraps=network.forward) as forward:
        model(**tokens)
    assert [*forward.call_args.kwargs["layers"]] == [network.num_layers]
    number = len(model.get_input_embeddings().weight)
    model.set_input_embeddings(model.resize_token_embeddings(number))
    assert_refused(f"has {number} tokens", partial(model.resize_token_embeddings, number + 1))


def check_precision(folder: Path, model: Any, tokens: Any) -> None:
    """Frequencies are not rounded; Performers refuse float16 when loaded, and at a first batch."""
    load = partial(type(model).from_pretrained, folder, low_cpu_mem_usage=True)
    bfloat16, rotary = load(torch_dtype=torch.bfloat16), model.network.rotary
    assert bfloat16.get_input_embeddings().weight.dtype == torch.bfloat16
    if rotary is not None:
        assert torch.equal(bfloat16.network.rotary.frequency, rotary.frequency)
    assert bfloat16(**tokens)[0].isfinite().all()
    kinds = {kind.__name__ for part in model.modules() for kind in type(part).__mro__}
    half = model.half()
    if rotary is not None:
        assert torch.equal(half.network.rotary.frequency, bfloat16.network.rotary.frequency)
    if "Performer" in kinds:
        says = "load with dtype=torch.bfloat16 or float32"
        assert_refused(says, partial(load, torch_dtype=torch.float16))
        assert_refused(says, partial(half, **tokens))
        assert torch.get_default_dtype() is torch.float32
    else:
        loaded = load(torch_dtype=torch.float16)
        assert torch.equal(half(**tokens)[0], loaded(**tokens)[0])


def check_causal(folder: Path, tokenizer: Any, tokens: Any, inputs: dict[str, Any]) -> None:
    """An adapter for causal models is trained, saved and loaded; `generate` names protlm's."""
    load = partial(AutoModelForCausalLM.from_pretrained, folder, trust_remote_code=True)
    config = LoraConfig(r=2, target_modules=["query", "up"], task_type="CAUSAL_LM")
    model: Any = get_peft_model(load(), config)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        model(**tokens, labels=inputs["labels"]).loss.backward()
        optimizer.step()
    model.eval().save_pretrained(folder / "causal_adapter")
    again = PeftModel.from_pretrained(load(), folder / "causal_adapter")
    compare("logits of adapters", again(**tokens).logits, model(**tokens).logits)
    assert (model(**tokens).logits[inputs["mask"]] - inputs["logits"]).abs().max() > 1e-4
    models: list[Any] = [load(), model]
    assert torch.equal(pickle.loads(pickle.dumps(load()))(**tokens)[0], load()(**tokens)[0])
    for one in models:
        assert_refused("type protlm generate", partial(one.generate, **tokens))
    generator = pipeline("text-generation", model=load(), tokenizer=tokenizer)
    assert_refused("type protlm generate", partial(generator, "MKT"))


def check_labels(folder: Path, tokens: Any, inputs: dict[str, Any]) -> None:
    """Classifiers of proteins and of residues are trained, with recomputed activations."""
    mask_BL, last_ND = inputs["mask"], inputs["hidden"][-1]
    for auto in (AutoModelForSequenceClassification, AutoModelForTokenClassification):
        model: Any = auto.from_pretrained(
            folder, trust_remote_code=True, num_labels=3, low_cpu_mem_usage=True
        )
        assert not model.classifier.bias.any()
        assert 0.01 < model.classifier.weight.std() < 0.03
        is_whole, gradients = auto is AutoModelForSequenceClassification, []
        labels = torch.arange(3) if is_whole else mask_BL * 2 - 100 * ~mask_BL
        for enable in (False, True):
            if enable:
                model.train().gradient_checkpointing_enable()
            model.zero_grad()
            out = model(**tokens, labels=labels)
            out.loss.backward()
            gradients.append(model.get_input_embeddings().weight.grad)
        compare("gradients", *gradients)
        rows = last_ND.split(mask_BL.sum(1).tolist())
        means_BD = torch.stack([row[slice(*inputs["inner"])].mean(0) for row in rows])
        found, vectors = (out.logits, means_BD) if is_whole else (out.logits[mask_BL], last_ND)
        compare("labels", found, model.classifier(vectors))
        model.save_pretrained(folder / f"saved_{auto.__name__}")


def check_training(folder: Path, tokenizer: Any, tokens: Any) -> None:
    """An adapter of PEFT is trained by Trainer, merged and saved, and used in a pipeline."""
    base = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)
    model: Any = get_peft_model(base, LoraConfig(r=2, target_modules=["query", "up"]))
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(4, 24, (8, 9))]
    settings: dict[str, Any] = {"max_steps": 2, "learning_rate": 0.1, "use_cpu": True}
    settings |= {"report_to": [], "gradient_checkpointing": True, "save_strategy": "no"}
    arguments = TrainingArguments(output_dir=str(folder / "trained"), **settings)
    Trainer(model=model, args=arguments, train_dataset=rows).train()
    model.save_pretrained(folder / "adapter")
    merged = model.eval().merge_and_unload()
    merged.save_pretrained(folder / "merged")
    with torch.no_grad():
        torch.save(merged(**tokens).logits[tokens["attention_mask"] > 0], folder / "merged.pt")
    filled = pipeline("fill-mask", model=merged, tokenizer=tokenizer, top_k=3)("MKT<mask>Q")
    assert len(filled) == 3 and filled[0]["score"] >= filled[1]["score"], filled


def check_misuse(folder: Path, model: Any, tokens: Any) -> None:
    """No other architecture builds itself, and padding is on the right."""
    for other in OTHERS:
        assert_refused("NoneType", partial(other.from_pretrained, folder))
    left = {name: value.flip(1) for name, value in tokens.items()}
    hole = tokens["attention_mask"].clone()
    hole[:, 1] = 0
    for given in (left, {"input_ids": left["input_ids"]}, {**tokens, "attention_mask": hole}):
        assert_refused("padding_side = 'right'", partial(model, **given))


def run(model: Any, tokens: Any, inputs: dict[str, Any]) -> Any:
    """Returns the outputs of a model, after a comparison of hidden states and maps."""
    mask_BL = inputs["mask"]
    out = model(**tokens, output_hidden_states=True, output_attentions=True)
    for number, hidden in enumerate(inputs["hidden"]):
        compare(f"hidden states {number}", out.hidden_states[number][mask_BL], hidden)
    for number, maps in enumerate(inputs["maps"]):
        rows = mask_BL[:, None, :, None].expand_as(out.attentions[number])
        compare(f"maps {number}", out.attentions[number][rows], maps)
    return out


# The first has code; that of the others differs in the architecture only.
for number, path in enumerate(sys.argv[1:]):
    check(Path(path), with_misuse=number == 0)
