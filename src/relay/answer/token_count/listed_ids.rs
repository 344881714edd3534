//! Counts the token ids that a whole answer lists, however its bytes are cut. Pure.

/// What stands before the list. A text of this content has its quotes escaped.
const NAME: &[u8] = b"\"token_ids\"";

#[derive(Debug, Default)]
pub(in crate::relay) struct ListedIds {
    pub(in crate::relay) count: u64,
    at: At,
    previous: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// So many bytes of the name have come.
    Name(usize),
    /// Behind the name.
    Colon,
    /// Behind the colon.
    Bracket,
    /// In the list, before the first digit of an id.
    Id,
    Digits,
}

impl Default for At {
    fn default() -> Self {
        Self::Name(0)
    }
}

impl ListedIds {
    pub(in crate::relay) fn add(&mut self, data: &[u8]) {
        for byte in data {
            self.at = self.next(*byte);
            self.previous = *byte;
        }
    }

    fn next(&mut self, byte: u8) -> At {
        match (self.at, byte) {
            (At::Name(0), b'"') if self.previous == b'\\' => At::Name(0),
            (At::Name(matched), _) if byte == NAME[matched] => {
                if matched + 1 == NAME.len() {
                    At::Colon
                } else {
                    At::Name(matched + 1)
                }
            }
            (At::Colon, b':') => At::Bracket,
            (At::Bracket, b'[') => At::Id,
            (At::Id | At::Digits, b']') => At::Name(0),
            (At::Digits, b',') => At::Id,
            (At::Id, b'0'..=b'9') => {
                self.count += 1;
                At::Digits
            }
            (at @ (At::Id | At::Digits), _) => at,
            (at @ (At::Colon | At::Bracket), _) if byte.is_ascii_whitespace() => at,
            // The next name may begin here.
            (_, b'"') => At::Name(1),
            _ => At::Name(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn count(pieces: &[&[u8]]) -> u64 {
        let mut ids = ListedIds::default();
        for piece in pieces {
            ids.add(piece);
        }
        ids.count
    }

    #[test]
    fn a_text_of_the_same_letters_lists_nothing() {
        let answer = json!({"choices": [{"text": "\"token_ids\":[1,2]", "token_ids": [7, 8, 9], "x": ["token_ids", 1]}]});
        assert_eq!(count(&[answer.to_string().as_bytes()]), 3);
        assert_eq!(
            count(&[br#"{"token_ids" : null, "token_ids" : [ 1 , 2 ]}"#]),
            2
        );
        assert_eq!(count(&[br#"{"token_ids":[]}"#]), 0);
    }

    proptest! {
        #[test]
        fn however_the_bytes_are_cut(ids in prop::collection::vec(prop::collection::vec(any::<u32>(), 0..9), 0..4), cuts in prop::collection::vec(0..400usize, 0..5)) {
            let choices: Vec<_> = ids.iter().map(|ids| json!({"index": 0, "token_ids": ids, "finish_reason": "stop"})).collect();
            let answer = json!({"choices": choices, "request_id": "a"}).to_string();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|at| at.min(answer.len())).collect();
            cuts.extend([0, answer.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&[u8]> = cuts.windows(2).map(|at| &answer.as_bytes()[at[0]..at[1]]).collect();
            prop_assert_eq!(count(&pieces), ids.iter().map(Vec::len).sum::<usize>() as u64);
        }
    }
}
