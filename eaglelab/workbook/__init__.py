"""The numbered notebooks' pieces, a module a question: `answer(book)` first, then what it rests on.

A notebook hands the names that its parameters cell has set to `open_book`, and shows pieces of what comes
back. Every piece is HTML or a picture that stands without a kernel.
"""

from eaglelab.workbook.book import NOTEBOOKS, BookParams, Workbook, book_params, open_book, read_book

__all__ = ["NOTEBOOKS", "BookParams", "Workbook", "book_params", "open_book", "read_book"]
