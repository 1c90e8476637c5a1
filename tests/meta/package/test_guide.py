"""A user's own kernel: plain functions as they are loaded, and every example of
docs/adding-a-kernel.md."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import torch

from references.masks import Causal
from tests.harness.fake_trials import PLAIN, acquitted, convicted, tried
from tests.harness.problem_tensors import INSIDE, arguments
from verify.campaign.run import open_run
from verify.campaign.targets import Target, excludes_group
from verify.cell.breach import Breach
from verify.cell.discovery import roster
from verify.cell.loading import Loaded, load
from verify.cell.process import ROOT
from verify.evidence import load as load_evidence
from verify.oracles import Oracle, groups
from verify.problem import Problem
from verify.problem.sampling import draws

torch.set_num_threads(1)

# Plain functions.

RIGHT = "torch.softmax(q.float() @ k.float().mT * {scale}, -1) @ v.float()"


def loaded(tmp_path: Path, text: str) -> Loaded:
    path = tmp_path / f"plain{len(list(tmp_path.iterdir()))}.py"
    path.write_text("import math\nimport torch\n" + textwrap.dedent(text), encoding="utf-8")
    return load(path, str(ROOT))


def called(
    tmp_path: Path,
    signature: str,
    *,
    returns: str = "q * 0",
    problem: Problem = INSIDE,
    lse: bool = False,
) -> dict:
    """The keyword arguments with which a plain function of that signature is called."""
    variant = loaded(
        tmp_path,
        f"SEEN = {{}}\ndef attention({signature}):\n    SEEN.update(locals())\n    return"
        f" {returns}\n",
    ).variants[0]
    args, out = arguments(problem)
    variant.forward(args, out, torch.zeros(out.shape[:3]) if lse else None, {})
    call = dict(zip(variant.forward.__code__.co_freevars, variant.forward.__closure__, strict=True))
    function = next(
        cell.cell_contents
        for cell in call["call"].cell_contents.__closure__
        if getattr(cell.cell_contents, "__name__", "") == "attention"
    )
    return dict(function.__globals__["SEEN"])


@pytest.mark.parametrize("name", ["causal", "is_causal"])
def test_a_causal_flag_is_set_for_causal_masks_only(tmp_path: Path, name: str) -> None:
    assert (
        called(tmp_path, f"q, k, v, {name}=False", problem=INSIDE.but(mask=Causal()))[name] is True
    )
    assert called(tmp_path, f"q, k, v, {name}=False")[name] is False
    support = (
        loaded(tmp_path, f"def attention(q, k, v, {name}=False): return q").variants[0].support
    )
    assert support.masks == ("full", "causal.square")


@pytest.mark.parametrize("name", ["softmax_scale", "sm_scale", "scale"])
def test_a_scale_is_passed_under_any_of_its_names(tmp_path: Path, name: str) -> None:
    assert (
        called(tmp_path, f"q, k, v, *, {name}", problem=INSIDE.but(softmax_scale=-3.0))[name]
        == -3.0
    )
    assert (
        loaded(tmp_path, f"def attention(q, k, v, {name}=None): return q")
        .variants[0]
        .support.scales
        == "any"
    )


def test_without_a_scale_only_the_default_is_drawn(tmp_path: Path) -> None:
    support = loaded(tmp_path, "def attention(q, k, v): return q").variants[0].support
    assert (support.scales, support.masks, support.grouped_heads, support.score_mods) == (
        "default",
        ("full",),
        False,
        (),
    )
    assert (support.dtypes, support.head_dims, support.layouts) == (
        ("float16", "bfloat16", "float32"),
        (32, 64, 128),
        "contiguous",
    )


@pytest.mark.parametrize("name", ["attn_mask", "mask"])
def test_a_mask_argument_gets_booleans(tmp_path: Path, name: str) -> None:
    problem = INSIDE.but(mask=Causal(), seqlen_q=9)
    mask = called(tmp_path, f"q, k, v, {name}=None", problem=problem)[name]
    assert mask.dtype == torch.bool
    assert torch.equal(mask, problem.mask.dense(2, 2, 9, 9))
    assert called(tmp_path, f"q, k, v, {name}=None")[name] is None


def test_a_flag_goes_before_a_mask(tmp_path: Path) -> None:
    seen = called(
        tmp_path, "q, k, v, attn_mask=None, is_causal=False", problem=INSIDE.but(mask=Causal())
    )
    assert (seen["attn_mask"], seen["is_causal"]) == (None, True)


def test_grouped_heads_are_drawn_where_the_signature_speaks_of_them(tmp_path: Path) -> None:
    grouped = INSIDE.but(heads_q=4)
    assert called(tmp_path, "q, k, v, enable_gqa=False", problem=grouped)["enable_gqa"] is True
    assert called(tmp_path, "q, k, v, enable_gqa=False")["enable_gqa"] is False
    assert (
        loaded(tmp_path, "def attention(q, k, v, enable_gqa=False): return q")
        .variants[0]
        .support.grouped_heads
    )


def test_a_pair_is_out_and_lse(tmp_path: Path) -> None:
    variant = loaded(
        tmp_path, "def attention(q, k, v): return q + 1, torch.full(q.shape[:3], 7.0)"
    ).variants[0]
    assert variant.contract.lse == "natural"
    args, out = arguments(INSIDE)
    lse = torch.zeros(out.shape[:3])
    variant.forward(args, out, lse, {})
    assert bool((out == 1).all())
    assert bool((lse == 7).all())
    assert (
        loaded(tmp_path, "def attention(q, k, v):\n    r = q, 1\n    return r")
        .variants[0]
        .contract.lse
        is None
    )


def test_dtypes_and_head_dims_of_the_module_are_taken(tmp_path: Path) -> None:
    text = "DTYPES = ('float32',)\nHEAD_DIMS = (64,)\ndef attention(q, k, v): return q"
    found = loaded(tmp_path, text)
    assert found.undeclared
    assert (found.variants[0].support.dtypes, found.variants[0].support.head_dims) == (
        ("float32",),
        (64,),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("X = 1", "no function of (q, k, v)"),
        ("def one(x): return x", "no function of (q, k, v)"),
        ("def _hidden(q, k, v): return q", "no function of (q, k, v)"),
        (
            "from torch.nn.functional import scaled_dot_product_attention",
            "no function of (q, k, v)",
        ),
        (
            "def one(q, k, v): return q\ndef two(q, k, v): return q",
            "more than one function of (q, k, v)",
        ),
        ("VARIANT = 3", "must be a verify.variant.Variant"),
        ("VARIANTS = []", "must be a verify.variant.Variant"),
    ],
)
def test_a_file_without_a_kernel_is_a_breach(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(Breach, match=re.escape(words)):
        loaded(tmp_path, text)


def test_which_function_is_on_trial(tmp_path: Path) -> None:
    known = "def helper(q, k, v): return q * 0\ndef attention(q, k, v): return q + 1"
    capital = "def mine(Query, Key, Value): return Query + 1\ndef helper(x): return x"
    for text in (known, capital, "def mine(q, k, v, x=1): return q + 1\nimport os"):
        variant = loaded(tmp_path, text).variants[0]
        args, out = arguments(INSIDE)
        variant.forward(args, out, None, {})
        assert bool((out == 1).all())


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ("None", "returned NoneType, not a torch.Tensor"),
        ("(3, 4)", "returned an LSE that is not a tensor of shape (2, 2, 8)"),
        ("(q, q)", "returned an LSE that is not a tensor of shape (2, 2, 8)"),
        ("q[:, :, :3]", "returned shape (2, 2, 3, 64), expected (2, 2, 8, 64)"),
        ("q.transpose(1, 2)", "returned shape (2, 8, 2, 64)"),
        ("q.double()", "returned dtype torch.float64, expected torch.float16"),
        ("q.to('meta')", "returned a tensor on meta, expected cpu"),
        ("q", "returned its input q"),
        ("v[:, :, :8]", "returned its input v"),
    ],
)
def test_a_wrong_result_is_a_breach(tmp_path: Path, result: str, words: str) -> None:
    with pytest.raises(Breach, match=re.escape(words)):
        called(tmp_path, "q, k, v", returns=result, lse=result.startswith("("))


# Declarations that no case can be made of: a verdict on the file, never an accident of the judge.

NONSENSE = {
    "exp": (
        'numerics=Numerics(softmax=Softmax(exp="bogus"))',
        "numerics.softmax.exp: 'bogus' is none of",
    ),
    "prescale": (
        'numerics=Numerics(products=Products(prescale="k"))',
        "numerics.products.prescale: 'k'",
    ),
    "field": (
        'numerics=Numerics(exp="expf")',
        "numerics.exp: no such field; numerics has products, softmax, output",
    ),
    "lse": ('contract=Contract(lse="base3")', "contract.lse: 'base3'"),
    "masked": ('contract=Contract(masked_values="none")', "contract.masked_values: 'none'"),
    "nan": ('contract=Contract(nan="never")', "contract.nan: 'never'"),
    "dtype": (
        'support=Support(dtypes=("float17",), head_dims=(32,))',
        "dtypes: 'float17' is none of",
    ),
    "no_dims": ('support=Support(dtypes=("float16",), head_dims=())', "head_dims"),
    "object": (
        "support=Support(dtypes=(torch.float16,), head_dims=(32,))",
        "support.dtypes: torch.float16 is none of",
    ),
    "name": ('name="a:b c"', "name: 'a:b c'"),
    "no_config": ("configs=[]", "configs: none"),
    "config": ('configs=[Config(options=(("acc", "ex2_approx"),))]', "parses back"),
    "twice": ("configs=[Config(), Config()]", "a unique name"),
    "available": ("available=lambda: 1 / 0", "ZeroDivisionError"),
}


def test_nonsense_in_a_declaration_does_not_load(tmp_path: Path) -> None:
    text = """
        import torch
        from verify.variant import Config, Contract, Numerics, Products, Softmax, Support, Variant
        support = Support(dtypes=("float16",), head_dims=(32,))
        given = dict(name="x", family="torch", forward=print, support=support)
        VARIANT = Variant(**(given | dict({})))
        """
    for name, (changes, _) in NONSENSE.items():
        (tmp_path / f"{name}.py").write_text(
            textwrap.dedent(text).format(changes), encoding="utf-8"
        )
    (tmp_path / "fine.py").write_text(textwrap.dedent(text).format(""), encoding="utf-8")
    (tmp_path / "same_name.py").write_text(
        textwrap.dedent(text).format("") + "VARIANTS = [VARIANT, VARIANT]", encoding="utf-8"
    )
    found = roster(sorted(tmp_path.iterdir()))
    assert [Path(declaration.path).stem for declaration in found.declarations] == ["fine"]
    said = {Path(failure.path).stem: failure.message for failure in found.failures}
    assert set(said) == {*NONSENSE, "same_name"}
    assert "two variants have the same" in said["same_name"]
    for name, (_, words) in NONSENSE.items():
        assert words in said[name]


# The guide.

Block = tuple[str, str]  # language, text


def blocks(page: Path, section: str = "") -> list[Block]:
    """The fenced code blocks of a page, or of the section whose heading contains those words."""
    text = page.read_text(encoding="utf-8")
    if section:
        parts = re.split(r"^(##+ .*)$", text, flags=re.MULTILINE)
        text = "".join(
            body
            for head, body in zip(parts[1::2], parts[2::2], strict=True)
            if section in head.lower()
        )
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def kernels(page: Path, section: str = "") -> list[str]:
    return [
        text
        for language, text in blocks(page, section)
        if language == "python" and re.search(r"^def |^VARIANT", text, re.M)
    ]


PAGES = [(ROOT / "docs" / "adding-a-kernel.md", ""), (ROOT / "README.md", "your own kernel")]
EXAMPLES = [
    pytest.param(text, id=f"{page.stem}-{number}")
    for page, section in PAGES
    if page.is_file()
    for number, text in enumerate(kernels(page, section))
]


def test_the_guide_has_a_plain_function_and_a_declared_variant() -> None:
    found = kernels(PAGES[0][0])
    assert len([text for text in found if "VARIANT = " in text]) == 1
    assert len([text for text in found if "VARIANT = " not in text and "ORACLE" not in text]) == 1


@pytest.mark.parametrize("text", [p for p in EXAMPLES if "ORACLE" not in p.values[0]])
def test_the_kernels_of_the_guide_load(tmp_path: Path, text: str) -> None:
    path = tmp_path / "example.py"
    path.write_text(text, encoding="utf-8")
    found = load(path, str(ROOT))
    assert len(found.variants) == 1
    assert found.undeclared is ("VARIANT" not in text)


def test_the_declared_kernel_of_the_guide_is_acquitted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two problems of every group that draws them, and all that the others ask.  Relations, known
    answers and long sequences are asked of the same algorithm in test_verdicts.py."""
    monkeypatch.chdir(tmp_path)
    (text,) = [text for text in kernels(PAGES[0][0]) if "VARIANT = " in text]
    Path("my_kernel.py").write_text(text, encoding="utf-8")
    run = open_run("ci", [Path("my_kernel.py")], "guide")
    (declared,) = run.roster.declarations
    assert declared.ref == "my_kernel.py@my-attention"
    (config,) = [config for config in declared.configs if config.block_n == 32]
    judge = run.judge("main")
    try:
        for group, asked in groups().items():
            apart = group in ("long", "lengths") or asked.family in ("exact", "relations")
            if not apart and excludes_group(declared, group) is None:
                target = Target(declared, config, "float32", group)
                for problem in target.asked if asked.asks else draws(target.problems, 2):
                    judge.judge(target, problem)
    finally:
        judge.close()
    judged = load_evidence(run.directory).verdicts
    assert not [verdict.finding for verdict in judged if verdict.outcome == "fail"]
    heard = {verdict.group for verdict in judged}
    assert heard >= {"accuracy", "counting", "gather", "poison", "refusal"}


def test_the_commands_of_the_guide_exist() -> None:
    """Every `verify` command that the guide shows is one, with options that it has."""
    from verify.cli import app

    shown = [
        line.strip()
        for language, text in blocks(PAGES[0][0])
        if language in ("", "sh")
        for line in text.splitlines()
    ]
    commands = [
        line.removeprefix("python -m ").split()
        for line in shown
        if line.startswith(("verify ", "python -m verify "))
    ]
    assert len(commands) >= 4
    for _, name, *words in commands:
        known = {option for parameter in app.commands[name].params for option in parameter.opts}
        assert {word for word in words if re.fullmatch(r"-{1,2}[a-z][a-z-]*", word)} <= known


def test_the_oracle_of_the_guide_works() -> None:
    (text,) = [
        text
        for language, text in blocks(PAGES[0][0])
        if language == "python" and "ORACLE = " in text
    ]
    names: dict[str, object] = {}
    exec(compile(text, "oracle.py", "exec"), names)
    oracle = names["ORACLE"]
    assert isinstance(oracle, Oracle)
    assert not oracle.concerns(tried(PLAIN))
    positive = PLAIN.but(distribution="ones_v")
    assert oracle.concerns(tried(positive))
    assert acquitted(oracle.judge(tried(positive)))
    convicted(oracle.judge(tried(positive, lambda out, lse: out[0, 0].neg_())), "out is negative")
