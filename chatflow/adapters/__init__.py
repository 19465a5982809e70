"""Other packages' terms for what chatflow keeps: one module a package, each an extra.

`openai_agents` is a session of OpenAI's Agents SDK, `litellm` converts lists of its messages, `starlette` and `fastapi`
give a web application its runners. Of ours only the command imports any of it: the items of the Agents SDK, to bring
them in.
"""
