//! The lines of a shard: which are to be sent, in which order, and which cannot be sent. Pure.

use std::sync::Arc;

use bytes::Bytes;

use crate::batches::batch::BatchRecord;
use crate::batches::line::{self, LineError};
use crate::batches::shards::{self, Shard};
use crate::json_scan::Scan;

/// Sorted lines are dealt into so many columns and sent row by row, so that up to as many lines lie between two that follow each
/// other in sorted order. Sent one after the other, both would compute their common prefix; much later, it may have left the cache.
/// docs/batch.md has what was measured.
const COLUMNS: usize = 16;

/// A line that may be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct InputLine {
    /// Its number in the file.
    pub(super) number: u32,
    pub(super) custom_id: String,
    pub(super) model: Arc<str>,
    pub(super) body: Bytes,
    /// The raw JSON of the conversation that it is added to. Lines that name one alike run one after the other.
    pub(super) conversation: Option<Bytes>,
}

/// A line that cannot be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct InvalidLine {
    pub(super) number: u32,
    pub(super) custom_id: String,
    pub(super) error: LineError,
}

/// The lines of a shard that have no result yet.
#[derive(Debug, Default)]
pub(super) struct InputLines {
    /// In the order in which they are sent, see [`COLUMNS`].
    pub(super) lines: Vec<InputLine>,
    pub(super) invalid: Vec<InvalidLine>,
}

impl InputLines {
    /// Of the `bytes` of a shard. `has_result`: whether a line was run before.
    pub(super) fn of(
        bytes: &Bytes,
        shard: &Shard,
        record: &BatchRecord,
        has_result: impl Fn(u32) -> bool,
    ) -> Self {
        let mut read = Vec::new();
        let mut invalid = Vec::new();
        for (number, text) in shards::lines(bytes, shard.first_line) {
            if has_result(number) {
                continue;
            }
            match line::read(text, record.endpoint) {
                Ok(line) => read.push((number, line)),
                Err(error) => invalid.push(InvalidLine {
                    number,
                    custom_id: custom_id(text),
                    error,
                }),
            }
        }
        // Stable: lines that begin alike stay in the file's order.
        read.sort_by(|(_, one), (_, other)| one.sort_key().cmp(&other.sort_key()));
        let mut last: Option<Arc<str>> = None;
        let lines = dealt(read).map(|(number, line)| {
            let same = last.take().filter(|last| **last == *line.model);
            let model = same.unwrap_or_else(|| Arc::from(&*line.model));
            last = Some(model.clone());
            InputLine {
                number,
                custom_id: line.custom_id.into_owned(),
                model,
                body: bytes.slice_ref(line.body),
                conversation: line
                    .conversation
                    .map(|value| bytes.slice_ref(value.as_bytes())),
            }
        });
        Self {
            lines: lines.collect(),
            invalid,
        }
    }
}

/// Row by row what lies in [`COLUMNS`] columns, one below the other.
fn dealt<T>(sorted: Vec<T>) -> impl Iterator<Item = T> {
    let rows = sorted.len().div_ceil(COLUMNS).max(1);
    let mut numbered: Vec<(usize, T)> = sorted.into_iter().enumerate().collect();
    // Stable: the columns keep their order.
    numbered.sort_by_key(|(index, _)| index % rows);
    numbered.into_iter().map(|(_, item)| item)
}

/// The `custom_id` of a line that may be wrong otherwise; empty if there is none.
pub(super) fn custom_id(line: &[u8]) -> String {
    let mut found = None;
    if let Some(scan) = Scan::<true>::of_bytes(line) {
        let _ = scan.whole_object(|name, value| {
            if name == "custom_id" {
                found = Some(value);
            }
        });
    }
    let text = found.filter(|value: &&str| value.starts_with('"'));
    let text = text.and_then(|value| Scan::<false>::new(value).text());
    text.unwrap_or_default().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batches::line::{LineEndpoint, MAX_LINE_BYTES};

    fn line(id: &str, model: &str, prompt: &str) -> String {
        format!(
            r#"{{"custom_id":"{id}","method":"POST","url":"/v1/completions","body":{{"model":"{model}","prompt":"{prompt}"}}}}"#
        )
    }

    #[test]
    fn lines_with_a_common_prefix_follow_each_other() {
        let text = [
            line("a", "m", "two b"),
            line("b", "n", "one"),
            String::new(),
            r#"{"custom_id":"wrong"}"#.to_owned(),
            line("c", "m", "one a"),
            line("d", "m", "two a"),
            line("e", "m", "one b"),
        ];
        let bytes = Bytes::from(text.join("\n"));
        let shard = Shard {
            offset: 0,
            bytes: bytes.len() as u64,
            first_line: 10,
            lines: 6,
        };
        let record = BatchRecord {
            endpoint: LineEndpoint::Completions,
            ..BatchRecord::default()
        };
        let found = InputLines::of(&bytes, &shard, &record, |number| number == 15);
        let order: Vec<(u32, &str, &str)> = found
            .lines
            .iter()
            .map(|line| (line.number, &*line.custom_id, &*line.model))
            .collect();
        let expected = [
            (13, "c", "m"),
            (14, "d", "m"),
            (10, "a", "m"),
            (11, "b", "n"),
        ];
        assert_eq!(order, expected);
        assert_eq!(found.lines[0].body, r#"{"model":"m","prompt":"one a"}"#);
        assert_eq!(found.invalid.len(), 1);
        let invalid = &found.invalid[0];
        assert_eq!((invalid.number, &*invalid.custom_id), (12, "wrong"));
        assert!(bytes.len() < MAX_LINE_BYTES as usize);
    }

    #[test]
    fn only_responses_have_a_conversation() {
        let line = |endpoint: LineEndpoint, conversation: &str| {
            let path = endpoint.path();
            let body = format!(r#"{{"model":"m","conversation":{conversation}}}"#);
            let text =
                format!(r#"{{"custom_id":"a","method":"POST","url":"{path}","body":{body}}}"#);
            let bytes = Bytes::from(text);
            let record = BatchRecord {
                endpoint,
                ..BatchRecord::default()
            };
            let found = InputLines::of(&bytes, &Shard::default(), &record, |_| false);
            found.lines[0].conversation.clone()
        };
        let named = line(LineEndpoint::Responses, r#""conv_1""#);
        assert_eq!(named.as_deref(), Some(br#""conv_1""#.as_slice()));
        assert_eq!(line(LineEndpoint::Responses, "null"), None);
        assert_eq!(line(LineEndpoint::ChatCompletions, r#""conv_1""#), None);
    }

    #[test]
    fn lines_that_follow_each_other_when_sorted_are_sent_apart() {
        let dealt = |count: usize| dealt((0..count).collect()).collect::<Vec<usize>>();
        assert!(dealt(0).is_empty());
        for few in [1, 2, COLUMNS] {
            assert_eq!(dealt(few), (0..few).collect::<Vec<_>>());
        }
        assert_eq!(dealt(20)[..11], [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 1]);
        for count in [64, 250, 256] {
            let order = dealt(count);
            let sent = |line| order.iter().position(|&one| one == line).unwrap();
            let rows = count.div_ceil(COLUMNS);
            for line in (1..count).filter(|line| line % rows > 0) {
                let apart = sent(line) - sent(line - 1);
                assert!((COLUMNS - 1..=COLUMNS).contains(&apart), "{count}: {line}");
            }
        }
    }

    #[test]
    fn a_custom_id_is_found_in_a_line_that_is_wrong() {
        assert_eq!(custom_id(br#"{"custom_id":"a\n","body":1}"#), "a\n");
        assert_eq!(custom_id(br#"{"custom_id":7}"#), "");
        assert_eq!(custom_id(b"no"), "");
    }
}
