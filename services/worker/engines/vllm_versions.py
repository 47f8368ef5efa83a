"""The versions of vLLM that the vllm engine supports."""

VLLM_OLDEST, VLLM_NEWEST = "0.27", "0.33"  # the first that is supported, the first that is not
SUPPORTED = f"vLLM {VLLM_OLDEST} up to, not including, {VLLM_NEWEST}"
NEEDED = f"the vllm engine needs {SUPPORTED}: in a checkout of Slackline, pip install -e '.[vllm]'"
