"""The versions of vLLM that the vllm engine supports."""

VLLM_OLDEST, VLLM_NEWEST = "0.27", "0.33"  # the first that is supported, the first that is not
SUPPORTED = f"vLLM {VLLM_OLDEST} up to, not including, {VLLM_NEWEST}"
NEEDED = (
    f"the vllm engine needs {SUPPORTED}, in an environment of its own: docs/run-on-my-gpu.md makes "
    "one for a GPU, `make test-vllm` one for the CPU"
)
