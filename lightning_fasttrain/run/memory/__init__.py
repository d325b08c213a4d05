"""Records what memory was used for, moment by moment.

A record becomes a page, a picture or a table.

From the bottom up: ``memory_events``, ``memory_record``, ``memory_page``, ``memory_files``, ``memory_recording``,
``memory_timeline``.
"""
