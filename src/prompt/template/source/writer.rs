//! Writes texts and knows the line that they are on. Pure.

/// A source that is being written.
pub(super) struct Writer {
    pub(super) out: String,
    line: u16,
}

impl Writer {
    pub(super) fn new() -> Self {
        Self {
            out: String::new(),
            line: 1,
        }
    }

    pub(super) fn put(&mut self, text: &str) {
        let lines = text.bytes().filter(|byte| *byte == b'\n').count();
        let lines = u16::try_from(lines).unwrap_or(u16::MAX);
        self.line = self.line.saturating_add(lines);
        self.out.push_str(text);
    }

    /// Begins a tag on its line, so that errors name it.
    pub(super) fn open(&mut self, tag: &str, line: u16) {
        self.put(tag);
        while self.line < line {
            self.put("\n");
        }
    }
}
