"""A study as a page: sections are written once, as blocks, and rendered as HTML and as Markdown."""
