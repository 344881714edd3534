//! Where an engine's tokens part from ours: found by comparing a prompt with what the engine told of
//! blocks that it stored since. Pure.

use serde::Serialize;

/// Tokens shown before the first that differs, and from it on.
const BEFORE: usize = 12;
const AFTER: usize = 20;

/// Tokens that an engine told with blocks it stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Heard {
    /// Whether a prompt begins with them.
    pub is_start: bool,
    /// As many of them as are kept.
    pub tokens: Box<[u32]>,
}

/// The first token that differs, and what is around it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// Counted from 0, as the token is.
    pub block: u32,
    pub token: u32,
    /// The prompt's full blocks.
    pub blocks: u32,
    /// The router's, from a few tokens before the first that differs.
    pub ours: Vec<u32>,
    /// The engine's; none where it told of nothing that can be compared (it had the blocks before).
    pub theirs: Vec<u32>,
    pub our_text: Option<String>,
    pub their_text: Option<String>,
}

impl Difference {
    /// Compares a prompt, of which the engine held `depth` blocks, with all that it told since.
    pub fn find(ours: &[u32], block_size: usize, depth: usize, heard: &[Heard]) -> Self {
        let blocks = ours.len() / block_size;
        let ours = &ours[..blocks * block_size];
        let known = (depth * block_size).min(ours.len());
        let candidates = heard.iter().filter_map(|heard| {
            // What continues a prompt continues perhaps this one, after what the engine held of it.
            let offset = if heard.is_start { 0 } else { known };
            let rest = ours.get(offset..).filter(|rest| !rest.is_empty())?;
            let same = rest.iter().zip(&heard.tokens).take_while(|(a, b)| a == b);
            let same = same.count();
            let is_this = match heard.is_start {
                true => offset + same >= known,
                false => depth > 0 && (same > 0 || heard.tokens.len() == rest.len()),
            };
            // A whole match is the prompt itself, come late, and tells of no difference.
            let differs = same < rest.len() && same < heard.tokens.len();
            let length = heard.tokens.len().abs_diff(rest.len());
            (is_this && differs).then_some((offset + same, length, offset, heard))
        });
        let nearest = candidates.min_by_key(|(at, length, ..)| (usize::MAX - at, *length));
        let around = |tokens: &[u32], at: usize| {
            let end = (at + AFTER).min(tokens.len());
            tokens[at.saturating_sub(BEFORE).min(end)..end].to_vec()
        };
        let (at, theirs) = match nearest {
            Some((at, _, offset, heard)) => {
                let mut theirs = ours[..offset].to_vec();
                theirs.extend_from_slice(&heard.tokens);
                (at, around(&theirs, at))
            }
            None => (known, Vec::new()),
        };
        Self {
            block: (at / block_size) as u32,
            token: at as u32,
            blocks: blocks as u32,
            ours: around(ours, at),
            theirs,
            our_text: None,
            their_text: None,
        }
    }

    pub(super) fn is_plainer_than(&self, other: &Self) -> bool {
        let order = |it: &Self| (!it.theirs.is_empty(), it.token);
        order(self) > order(other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(tokens: impl IntoIterator<Item = u32>) -> Heard {
        Heard {
            is_start: true,
            tokens: tokens.into_iter().collect(),
        }
    }

    fn more(tokens: impl IntoIterator<Item = u32>) -> Heard {
        Heard {
            is_start: false,
            ..start(tokens)
        }
    }

    fn found(depth: usize, heard: &[Heard]) -> (u32, u32, Vec<u32>) {
        let ours: Vec<u32> = (0..70).collect();
        let found = Difference::find(&ours, 16, depth, heard);
        assert_eq!(found.blocks, 4);
        assert_eq!(found.ours[0], found.token.saturating_sub(12));
        (found.block, found.token, found.theirs)
    }

    #[test]
    fn it_is_the_first_token_that_the_nearest_prompt_has_otherwise() {
        let other = |from: u32| (0..from).chain((from..64).map(|token| token + 1_000));
        assert_eq!(
            found(0, &[start(other(0)), start(other(20)), start(other(5))]),
            (1, 20, (8..20).chain(1_020..1_040).collect())
        );
        // Nothing is alike: the one that is as long.
        let theirs = found(0, &[start(5_000..5_016), start(other(0))]).2;
        assert_eq!(theirs, (1_000..1_020).collect::<Vec<u32>>());
    }

    #[test]
    fn it_may_be_in_what_continues_what_was_held() {
        let (block, token, theirs) = found(2, &[more((32..40).chain(900..924))]);
        assert_eq!((block, token, theirs[12]), (2, 40, 900));
        // The same blocks, and nothing of them: there where the held ones end.
        assert_eq!(found(2, &[more(900..932)]).1, 32);
        // Of another prompt, which parts from it before that.
        assert_eq!(found(2, &[start(900..964)]), (2, 32, vec![]));
    }

    #[test]
    fn nothing_told_is_no_more_than_where_the_held_blocks_end() {
        assert_eq!(found(0, &[]), (0, 0, vec![]));
        assert_eq!(found(3, &[]), (3, 48, vec![]));
        // The prompt itself, come late.
        assert_eq!(found(0, &[start(0..64)]), (0, 0, vec![]));
    }
}
