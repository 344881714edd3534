//! The shards of an input file: runs of lines that one replica takes at a time. Pure.

use std::ops::Range;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

/// Lines of a shard. Enough that sorting them brings shared prefixes together; few enough that the lines which a
/// replica dies with are soon run again.
pub const MAX_SHARD_LINES: u32 = 256;

/// Bytes of a shard that has more than one line: a replica holds its shards in memory.
pub const MAX_SHARD_BYTES: u64 = 4 << 20;

/// A part of an input file, from the first byte of a line to the last byte of another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Shard {
    pub offset: u64,
    pub bytes: u64,
    /// The number of its first line. Lines are numbered from 0, and blank ones have no number.
    pub first_line: u32,
    pub lines: u32,
}

impl Shard {
    /// The bytes of the file that it has.
    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset.saturating_add(self.bytes)
    }
}

/// A file's shards as a JSON text, which lies beside the parts of its results.
pub fn to_json(shards: &[Shard]) -> Bytes {
    // Numbers always serialize.
    Bytes::from(serde_json::to_vec(shards).unwrap_or_default())
}

pub fn from_json(text: &[u8]) -> Result<Vec<Shard>, serde_json::Error> {
    serde_json::from_slice(text)
}

/// The lines in the bytes of a shard, with their numbers. A line has no blanks around it, so neither line break nor
/// carriage return; blank lines are left out.
pub fn lines(bytes: &[u8], first_line: u32) -> impl Iterator<Item = (u32, &[u8])> {
    let lines = bytes.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
    (first_line..).zip(lines.filter(|line| !line.is_empty()))
}

/// Cuts a file into shards, given where its lines are.
#[derive(Debug)]
pub struct ShardCutter {
    max_lines: u32,
    max_bytes: u64,
    pub shards: Vec<Shard>,
    /// The lines so far.
    pub lines: u32,
}

impl Default for ShardCutter {
    fn default() -> Self {
        Self::new(MAX_SHARD_LINES, MAX_SHARD_BYTES)
    }
}

impl ShardCutter {
    /// Bounds of a shard; one line may have more than `max_bytes`.
    pub fn new(max_lines: u32, max_bytes: u64) -> Self {
        Self {
            max_lines,
            max_bytes,
            shards: Vec::new(),
            lines: 0,
        }
    }

    /// Adds the next line that is not blank, by its place in the file.
    pub fn push(&mut self, line: Range<u64>) {
        let number = self.lines;
        self.lines += 1;
        if let Some(last) = self.shards.last_mut() {
            let bytes = line.end.saturating_sub(last.offset);
            if last.lines < self.max_lines && bytes <= self.max_bytes {
                last.lines += 1;
                last.bytes = bytes;
                return;
            }
        }
        self.shards.push(Shard {
            offset: line.start,
            bytes: line.end.saturating_sub(line.start),
            first_line: number,
            lines: 1,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes, first line, lines.
    type Cut = (Range<u64>, u32, u32);

    fn cut(max_lines: u32, max_bytes: u64, lines: &[Range<u64>]) -> Vec<Cut> {
        let mut cutter = ShardCutter::new(max_lines, max_bytes);
        for line in lines {
            cutter.push(line.clone());
        }
        assert_eq!(cutter.lines as usize, lines.len());
        let shards = cutter.shards.into_iter();
        shards
            .map(|shard| (shard.range(), shard.first_line, shard.lines))
            .collect()
    }

    #[test]
    fn a_shard_is_full_of_lines_or_of_bytes() {
        let lines = [0..10, 11..20, 25..30, 31..200, 201..205];
        let by_lines: [Cut; 3] = [(0..20, 0, 2), (25..200, 2, 2), (201..205, 4, 1)];
        assert_eq!(cut(2, 1_000, &lines), by_lines);
        // The long line has a shard of its own, though it is larger than one may be.
        let by_bytes: [Cut; 3] = [(0..30, 0, 3), (31..200, 3, 1), (201..205, 4, 1)];
        assert_eq!(cut(9, 40, &lines), by_bytes);
        assert!(cut(9, 40, &[]).is_empty());
    }

    #[test]
    fn the_lines_of_a_shard_are_numbered_without_the_blank_ones() {
        let found: Vec<_> = lines(b"\r\n{1}\r\n \t\n{2} \n\n{3}", 7).collect();
        let expected: [(u32, &[u8]); 3] = [(7, b"{1}"), (8, b"{2}"), (9, b"{3}")];
        assert_eq!(found, expected);
        assert_eq!(lines(b"", 0).count(), 0);
    }

    #[test]
    fn shards_are_read_back_and_what_is_unknown_in_them_is_ignored() {
        let shards = [
            Shard {
                offset: 1,
                bytes: u64::from(u32::MAX) + 9,
                first_line: 0,
                lines: 256,
            },
            Shard::default(),
        ];
        assert_eq!(from_json(&to_json(&shards)).unwrap(), shards);
        let newer = br#"[{"offset":5,"bytes":6,"first_line":7,"lines":8,"models":["m"]}]"#;
        assert_eq!(from_json(newer).unwrap()[0].range(), 5..11);
        assert!(from_json(b"{}").is_err());
    }
}
