"""Hugging Face.

- model_folders: open whatever folder holds a model; export: write one
- folder_files, sparse_bitmask: what is in the files of a folder
- checked_loading, gpt2, model_card: the way through transformers, and what export adds
- import_hook, hf_quantizer: compressed folders in `from_pretrained` and `save_pretrained`
- chunk_loss, causal_lm, model_tokenizer, assistant_mask: to train a causal language model
- generation: to let it write; inspection: to count what a folder holds
"""
