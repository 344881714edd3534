//! Finds the first token where an engine's tokens differ from the router's, by comparing a prompt with the
//! blocks that the engine stored since. Pure.

use serde::Serialize;

/// Tokens shown before the first difference, and from there on.
const BEFORE: usize = 12;
const AFTER: usize = 20;

/// Tokens of blocks that an engine reported as stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReportedTokens {
    /// Whether they begin a prompt.
    pub is_start: bool,
    /// The first of them, as many as are recorded.
    pub tokens: Box<[u32]>,
}

/// The first token that differs, with the tokens around it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TokenDifference {
    /// Index of the block and of the token, from 0.
    pub block: u32,
    pub token: u32,
    /// Number of the prompt's full blocks.
    pub blocks: u32,
    /// The router's tokens, from a few before the first difference.
    pub router_tokens: Vec<u32>,
    /// The engine's tokens; empty if it reported nothing comparable (it had cached the blocks before).
    pub engine_tokens: Vec<u32>,
    pub router_text: Option<String>,
    pub engine_text: Option<String>,
}

impl TokenDifference {
    /// Compares a prompt, of which the engine caches `depth` blocks, with what it has reported since.
    pub fn find(
        router_tokens: &[u32],
        block_size: usize,
        depth: usize,
        reported: &[ReportedTokens],
    ) -> Self {
        let blocks = router_tokens.len() / block_size;
        let router_tokens = &router_tokens[..blocks * block_size];
        let known = (depth * block_size).min(router_tokens.len());
        let candidates = reported.iter().filter_map(|reported| {
            // A continuation may be this prompt's, after the blocks that the engine caches.
            let offset = if reported.is_start { 0 } else { known };
            let rest = router_tokens
                .get(offset..)
                .filter(|rest| !rest.is_empty())?;
            let same = rest
                .iter()
                .zip(&reported.tokens)
                .take_while(|(a, b)| a == b);
            let same = same.count();
            let is_this = if reported.is_start {
                offset + same >= known
            } else {
                depth > 0 && (same > 0 || reported.tokens.len() == rest.len())
            };
            // A complete match is the prompt itself, reported late: no difference.
            let differs = same < rest.len() && same < reported.tokens.len();
            let length = reported.tokens.len().abs_diff(rest.len());
            (is_this && differs).then_some((offset + same, length, offset, reported))
        });
        let nearest = candidates.min_by_key(|(at, length, ..)| (usize::MAX - at, *length));
        let around = |tokens: &[u32], at: usize| {
            let end = (at + AFTER).min(tokens.len());
            tokens[at.saturating_sub(BEFORE).min(end)..end].to_vec()
        };
        let (at, engine_tokens) = match nearest {
            Some((at, _, offset, reported)) => {
                let mut engine_tokens = router_tokens[..offset].to_vec();
                engine_tokens.extend_from_slice(&reported.tokens);
                (at, around(&engine_tokens, at))
            }
            None => (known, Vec::new()),
        };
        Self {
            block: (at / block_size) as u32,
            token: at as u32,
            blocks: blocks as u32,
            router_tokens: around(router_tokens, at),
            engine_tokens,
            router_text: None,
            engine_text: None,
        }
    }

    pub(super) fn is_clearer_than(&self, other: &Self) -> bool {
        let order = |difference: &Self| (!difference.engine_tokens.is_empty(), difference.token);
        order(self) > order(other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(tokens: impl IntoIterator<Item = u32>) -> ReportedTokens {
        ReportedTokens {
            is_start: true,
            tokens: tokens.into_iter().collect(),
        }
    }

    fn more(tokens: impl IntoIterator<Item = u32>) -> ReportedTokens {
        ReportedTokens {
            is_start: false,
            ..start(tokens)
        }
    }

    fn found(depth: usize, reported: &[ReportedTokens]) -> (u32, u32, Vec<u32>) {
        let router_tokens: Vec<u32> = (0..70).collect();
        let found = TokenDifference::find(&router_tokens, 16, depth, reported);
        assert_eq!(found.blocks, 4);
        assert_eq!(found.router_tokens[0], found.token.saturating_sub(12));
        (found.block, found.token, found.engine_tokens)
    }

    #[test]
    fn the_difference_is_in_the_most_similar_prompt() {
        let other = |from: u32| (0..from).chain((from..64).map(|token| token + 1_000));
        assert_eq!(
            found(0, &[start(other(0)), start(other(20)), start(other(5))]),
            (1, 20, (8..20).chain(1_020..1_040).collect())
        );
        // Nothing is alike: the one that is as long.
        let engine_tokens = found(0, &[start(5_000..5_016), start(other(0))]).2;
        assert_eq!(engine_tokens, (1_000..1_020).collect::<Vec<u32>>());
    }

    #[test]
    fn the_difference_may_be_after_the_cached_blocks() {
        let (block, token, engine_tokens) = found(2, &[more((32..40).chain(900..924))]);
        assert_eq!((block, token, engine_tokens[12]), (2, 40, 900));
        // The same blocks, and nothing of them: there where the held ones end.
        assert_eq!(found(2, &[more(900..932)]).1, 32);
        // Of another prompt, which parts from it before that.
        assert_eq!(found(2, &[start(900..964)]), (2, 32, vec![]));
    }

    #[test]
    fn without_reports_the_difference_is_where_the_cached_blocks_end() {
        assert_eq!(found(0, &[]), (0, 0, vec![]));
        assert_eq!(found(3, &[]), (3, 48, vec![]));
        // The prompt itself, come late.
        assert_eq!(found(0, &[start(0..64)]), (0, 0, vec![]));
    }
}
