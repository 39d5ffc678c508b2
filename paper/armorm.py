"""Makes a copy of ArmoRM, the paper's reward model, that transformers 5 can load.

    python paper/armorm.py runs/armorm

Its code imports a docstring that transformers 5 lacks. Then pass `--reward-model runs/armorm`.
"""

import sys
from pathlib import Path

IMPORT = "from transformers.models.llama.modeling_llama import LLAMA_INPUTS_DOCSTRING"


def repair(folder: Path):
    """Replaces the import in the model's code by an empty docstring."""
    for path in folder.glob("*.py"):
        path.write_text(path.read_text().replace(IMPORT, 'LLAMA_INPUTS_DOCSTRING = ""'))


if __name__ == "__main__":
    from huggingface_hub import snapshot_download

    repair(Path(snapshot_download("RLHFlow/ArmoRM-Llama3-8B-v0.1", local_dir=sys.argv[1])))
