"""The shape of the scripts: how much they hold, how dense they are, and what siblings have in common."""

import ast
import io
import subprocess
import tokenize

import pytest
from conftest import ROOT

pytestmark = pytest.mark.shape  # whoever changes a script tests what it does, not how long it is
TOKENS = {  # of code at most: without comments, docstrings, line ends and indents
    "dpo_humanline.py": 3200,
    "kto_humanline.py": 3720,
    "grpo_humanline.py": 3860,
    "grpo_math_humanline.py": 3700,
    "utils.py": 3140,
    "support/data.py": 2180,
    "support/sampling.py": 3050,
    "support/run.py": 4320,
    "support/grading.py": 1700,
    "contrib/trl_humanline.py": 1800,
}
# What a file may import of the others: imports go one way.
IMPORTS = {
    "utils.py": set(),
    "support/run.py": {"utils"},
    "support/data.py": {"utils", "run"},
    "support/sampling.py": {"utils", "run", "data"},
    "support/grading.py": {"run"},
}
MAIN = {  # lines of code and names at most, and the line before which the training loop begins
    "dpo_humanline.py": (81, 45, 215),
    "kto_humanline.py": (90, 55, 255),
    "grpo_humanline.py": (91, 55, 255),
    "grpo_math_humanline.py": (90, 55, 245),
}
SCRIPTS = list(MAIN)
CHANGED_LINES = {  # of code, of `diff` at most
    ("dpo_humanline.py", "kto_humanline.py"): 165,
    ("kto_humanline.py", "grpo_humanline.py"): 216,
    ("grpo_humanline.py", "grpo_math_humanline.py"): 492,  # the one reads pairs, the other grades answers
}
# Each script's own.
OWN = set("Args Evaluation load_data encode_row group_advantages sample_round evaluate main".split())
BANNERS = ["Args", "Loss", "Training", "Data", "Models", "Rounds and evaluation", "Metrics"]
SILENT = {getattr(tokenize, name) for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")}
COMPREHENSION = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def read(name: str) -> str:
    return (ROOT / name).read_text()


def nodes(name: str, kind) -> list:
    return [node for node in ast.walk(ast.parse(read(name))) if isinstance(node, kind)]


def definitions(name: str) -> dict[str, ast.stmt]:
    """The functions and classes of a file by name."""
    tree = ast.parse(read(name))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def code_tokens(name: str) -> list:
    """The tokens of a file without comments and docstrings."""
    docstrings = set()  # lines
    for node in nodes(name, ast.Module | ast.ClassDef | ast.FunctionDef):
        if ast.get_docstring(node):
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    tokens = tokenize.generate_tokens(io.StringIO(read(name)).readline)
    return [token for token in tokens if token.type not in SILENT and token.start[0] not in docstrings]


def code_lines(name: str) -> dict[int, str]:
    """The lines of a file that hold code, by number and without their comments."""
    lines = read(name).splitlines()
    for token in tokenize.generate_tokens(io.StringIO(read(name)).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip()
    numbers = set()
    for token in code_tokens(name):
        numbers |= set(range(token.start[0], token.end[0] + 1))
    return {number: lines[number - 1] for number in sorted(numbers)}


def length(name: str, node) -> int:
    """The lines of code of a function."""
    return sum(node.lineno <= number <= node.end_lineno for number in code_lines(name))


@pytest.mark.parametrize("name", TOKENS)
def test_a_file_is_read_in_one_sitting(name):
    assert len(code_tokens(name)) <= TOKENS[name]


@pytest.mark.parametrize("name", TOKENS)
def test_a_line_is_not_dense(name):
    assert len(code_tokens(name)) / len(code_lines(name)) <= 9.9


@pytest.mark.parametrize("name", TOKENS)
def test_a_line_holds_one_thought(name):
    for node in nodes(name, COMPREHENSION):
        inner = [part for part in ast.walk(node) if isinstance(part, COMPREHENSION) and part is not node]
        assert not inner, f"line {node.lineno}: a comprehension in a comprehension"
    for call in nodes(name, ast.Call):
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        conditional = [part for part in arguments if isinstance(part, ast.IfExp)]
        assert not conditional, f"line {call.lineno}: a condition in an argument"
    for product in nodes(name, ast.BinOp):
        factors = (product.left, product.right)
        boolean = [factor for factor in factors if isinstance(factor, ast.Compare | ast.BoolOp)]
        found = isinstance(product.op, ast.Mult) and boolean
        assert not found, f"line {product.lineno}: a boolean times a value"
    assert not nodes(name, ast.NamedExpr)


@pytest.mark.parametrize("name", SCRIPTS)
def test_main_is_short(name):
    main = definitions(name)["main"]
    names = [node for node in ast.walk(main) if isinstance(node, ast.Name)]
    own = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    lines, locals_, first_step = MAIN[name]
    assert length(name, main) <= lines and len(own) <= locals_
    assert read(name).splitlines().index("    for step in range(progress.step, args.num_steps):") < first_step


@pytest.mark.parametrize("name", TOKENS)
def test_other_functions_are_shorter(name):
    functions = {node.name: length(name, node) for node in nodes(name, ast.FunctionDef)}
    functions.pop("main", None)
    assert {name: lines for name, lines in functions.items() if lines > 41} == {}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_sections_stand_in_one_order_and_the_two_lines_of_the_paper_are_two_lines(name):
    lines = read(name).splitlines()
    banners = [line[6:-4] for line in lines if line.startswith("# === ")]
    assert [banner for banner in banners if banner != "Rewards"] == BANNERS
    assert sum("# humanline clipping" in line for line in lines) == 1
    assert sum("# humanline syncing" in line for line in lines) == 1


def test_functions_of_one_name_are_the_same_in_all_scripts():
    first = {}  # {name: (script, source)}
    for script in SCRIPTS:
        for name, node in definitions(script).items():
            start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            source = read(script).splitlines()[start - 1 : node.end_lineno]
            where, known = first.setdefault(name, (script, source))
            assert name in OWN or known == source, f"{name} differs in {where} and {script}"


@pytest.mark.parametrize("pair", CHANGED_LINES, ids=" ".join)
def test_siblings_differ_in_their_algorithm_alone(pair, tmp_path):
    for name in pair:
        (tmp_path / name).write_text("\n".join(code_lines(name).values()))
    diff = subprocess.run(["diff", *pair], cwd=tmp_path, capture_output=True, text=True).stdout
    changed = [line for line in diff.splitlines() if line[0] in "<>"]
    assert 0 < len(changed) <= CHANGED_LINES[pair]


@pytest.mark.parametrize("name", IMPORTS)
def test_imports_go_one_way(name):
    found = set()
    for node in nodes(name, ast.Import):
        found |= {alias.name for alias in node.names}
    for node in nodes(name, ast.ImportFrom):
        if node.module == "support":
            found |= {alias.name for alias in node.names}
        found.add(node.module.removeprefix("support."))
    ours = {path.stem for path in [*ROOT.glob("*.py"), *ROOT.glob("support/*.py")]}
    assert found & ours == IMPORTS[name]


@pytest.mark.parametrize("name", TOKENS)
def test_no_assert_guards_anything(name):
    """`python -O` removes them."""
    assert not nodes(name, ast.Assert)
