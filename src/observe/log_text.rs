//! Log lines as `tracing_subscriber` writes them to what is no terminal, in a third of the time: its own formatter paints each
//! name and value for a terminal, also where there is none. With it, a line of the access log took a sixth of the CPU time of a
//! short request.

use std::cell::{Cell, RefCell};
use std::error::Error;
use std::fmt::{self, Debug, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use tracing::field::{Field, Visit};
use tracing_subscriber::field::{RecordFields, VisitOutput};
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::{DefaultVisitor, Writer};
use tracing_subscriber::fmt::time::FormatTime;

/// The message, then ` name=value` for each field.
#[derive(Debug)]
pub(super) struct PlainFields;

impl<'w> FormatFields<'w> for PlainFields {
    fn format_fields<R: RecordFields>(&self, writer: Writer<'w>, fields: R) -> fmt::Result {
        let mut line = Line {
            writer,
            is_empty: true,
            text: TEXT.take(),
            result: Ok(()),
        };
        fields.record(&mut line);
        line.pass_on();
        line.text.clear();
        TEXT.set(line.text);
        line.result
    }
}

thread_local! {
    /// The allocation of a line's text, for the next line of the thread.
    static TEXT: Cell<String> = const { Cell::new(String::new()) };
}

struct Line<'w> {
    writer: Writer<'w>,
    is_empty: bool,
    /// What is not written yet: a call of the writer for each part would take longer than to compose it.
    text: String,
    result: fmt::Result,
}

impl Line<'_> {
    /// Begins a field. Returns where its value goes.
    fn begin(&mut self, field: &Field) -> &mut String {
        if !std::mem::take(&mut self.is_empty) {
            self.text.push(' ');
        }
        let name = field.name();
        self.text.push_str(name.strip_prefix("r#").unwrap_or(name));
        self.text.push('=');
        &mut self.text
    }

    fn pass_on(&mut self) {
        if self.result.is_ok() {
            self.result = self.writer.write_str(&self.text);
        }
    }

    /// What the library's formatter does with a value that is rare.
    fn add_as_library(&mut self, add: impl FnOnce(&mut DefaultVisitor<'_>)) {
        self.pass_on();
        self.text.clear();
        let is_empty = std::mem::take(&mut self.is_empty);
        let mut visitor = DefaultVisitor::new(self.writer.by_ref(), is_empty);
        add(&mut visitor);
        self.result = self.result.and(visitor.finish());
    }
}

impl Visit for Line<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        if is_message(field) {
            return self.add_as_library(|visitor| visitor.record_str(field, value));
        }
        let text = self.begin(field);
        if is_plain(value) {
            text.push('"');
            text.push_str(value);
            text.push('"');
        } else {
            let _ = write!(text, "{value:?}");
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.begin(field)
            .push_str(itoa::Buffer::new().format(value));
    }

    fn record_error(&mut self, field: &Field, value: &(dyn Error + 'static)) {
        self.add_as_library(|visitor| visitor.record_error(field, value));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if is_message(field) {
            // It may have a text of a client's or an engine's: the library shows control characters as escapes.
            return self.add_as_library(|visitor| visitor.record_debug(field, value));
        }
        let written = write!(self.begin(field), "{value:?}");
        self.result = self.result.and(written);
    }
}

fn is_message(field: &Field) -> bool {
    field.name() == "message"
}

/// Whether a text stands between quotes as it is. Looks at every byte, which takes less than to stop at the first.
fn is_plain(text: &str) -> bool {
    let is_plain = |byte| matches!(byte, b' '..=b'~') & (byte != b'"') & (byte != b'\\');
    text.bytes().fold(true, |all, byte| all & is_plain(byte))
}

/// The time of day in UTC, to the microsecond.
#[derive(Debug)]
pub(super) struct Timestamp;

impl FormatTime for Timestamp {
    fn format_time(&self, writer: &mut Writer<'_>) -> fmt::Result {
        write_time(SystemTime::now(), writer)
    }
}

thread_local! {
    /// The last second that was written, in seconds since 1970 and as text: a busy thread writes many lines in each.
    static SECOND: RefCell<(u64, String)> = const { RefCell::new((u64::MAX, String::new())) };
}

fn write_time(time: SystemTime, writer: &mut impl Write) -> fmt::Result {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    SECOND.with_borrow_mut(|(second, text)| {
        if *second != since.as_secs() {
            let whole = jiff::Timestamp::from_second(since.as_secs() as i64).unwrap_or_default();
            *text = whole.strftime("%Y-%m-%dT%H:%M:%S.").to_string();
            *second = since.as_secs();
        }
        writer.write_str(text)
    })?;
    // The leading 1 keeps the zeros after it.
    let mut digits = itoa::Buffer::new();
    writer.write_str(&digits.format(1_000_000 + since.subsec_micros())[1..])?;
    writer.write_char('Z')
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;
    use std::time::Duration;

    use parking_lot::Mutex;
    use tracing::{Subscriber, debug, error, info, warn};
    use tracing_subscriber::filter::LevelFilter;

    use super::*;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[derive(Debug)]
    struct Failure(Option<Box<Failure>>);

    impl fmt::Display for Failure {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("it \u{1b}[31mfailed")
        }
    }

    impl Error for Failure {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            self.0.as_deref().map(|source| source as _)
        }
    }

    fn write_lines(subscriber: impl Subscriber + Send + Sync) {
        tracing::subscriber::with_default(subscriber, || {
            info!("only a message");
            info!(method = "POST", status = 200_u16, "request");
            info!(only = "a field");
            for text in [
                "",
                "plain",
                "\"quoted\" \\",
                "line\nbreak\t",
                "\u{e9}\u{4e16}",
                "\u{1b}[0m\u{7f}",
            ] {
                warn!(text, shown = %text, debugged = ?text, "{text}");
                info!(message = text);
            }
            info!(
                r#type = "raw",
                none = None::<u64>,
                some = Some("x"),
                "options"
            );
            info!(
                least = u64::MIN,
                most = u64::MAX,
                negative = -5_i64,
                small = 3_u8,
                is_true = true,
                huge = i128::MIN
            );
            info!(
                whole = 12.0,
                part = 593.378,
                little = 1e-9,
                nan = f64::NAN,
                "floats"
            );
            let deep = Failure(Some(Box::new(Failure(Some(Box::new(Failure(None)))))));
            error!(error = &deep as &(dyn Error + 'static), shown = %deep, "with causes");
            error!(error = &Failure(None) as &(dyn Error + 'static), "without");
            debug!("is below the level");
        });
    }

    #[test]
    fn a_line_is_the_same_as_the_librarys() {
        let (ours, theirs) = (Lines::default(), Lines::default());
        let (our_copy, their_copy) = (ours.clone(), theirs.clone());
        let builder = || {
            tracing_subscriber::fmt()
                .without_time()
                .with_ansi(false)
                .with_max_level(LevelFilter::INFO)
        };
        let plain = builder().fmt_fields(PlainFields);
        write_lines(plain.with_writer(move || our_copy.clone()).finish());
        write_lines(builder().with_writer(move || their_copy.clone()).finish());
        let text = |lines: Lines| String::from_utf8(lines.0.lock().clone()).unwrap();
        let (ours, theirs) = (text(ours), text(theirs));
        assert!(theirs.lines().count() > 20, "{theirs}");
        for (our_line, their_line) in ours.lines().zip(theirs.lines()) {
            assert_eq!(our_line, their_line);
        }
        assert_eq!(ours, theirs);
    }

    #[test]
    fn a_time_is_written_to_the_microsecond() {
        let cases = [
            (0, 0, "1970-01-01T00:00:00.000000Z"),
            (0, 1_999, "1970-01-01T00:00:00.000001Z"),
            (951_782_399, 999_999_999, "2000-02-28T23:59:59.999999Z"),
            (951_782_400, 50_000_000, "2000-02-29T00:00:00.050000Z"),
            (951_782_400, 60_000_000, "2000-02-29T00:00:00.060000Z"),
            (4_102_444_800, 7_000, "2100-01-01T00:00:00.000007Z"),
        ];
        for (seconds, nanos, expected) in cases {
            let mut text = String::new();
            write_time(UNIX_EPOCH + Duration::new(seconds, nanos), &mut text).unwrap();
            assert_eq!(text, expected);
        }
        let mut text = String::new();
        write_time(UNIX_EPOCH - Duration::from_secs(9), &mut text).unwrap();
        assert_eq!(text, "1970-01-01T00:00:00.000000Z");
    }
}
