"""HTML as a browser would see it, for tests."""

from html.parser import HTMLParser


class Reader(HTMLParser):
    """Collects what a browser would see: elements, attributes and text."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.text = [], [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data

    def handle_comment(self, data):
        self.tags.append("comment")


def read(page):
    reader = Reader()
    reader.feed(page)
    reader.close()
    return reader
