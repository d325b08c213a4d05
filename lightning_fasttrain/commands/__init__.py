"""Commands of ``fasttrain`` that are a topic of their own. What is heavy is imported when one of them runs.

From the bottom up: ``rehearsed_script``, ``rehearse_command``.
"""
