//! Models of the published routing formulas of other routers, for comparison only. They get the same knowledge of
//! caches and loads as this router's policies. Pure.

use serde::Serialize;

/// A worker as the formulas see it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Candidate {
    pub(super) requests: u32,
    /// Queued prefill tokens.
    pub(super) queued_tokens: u64,
    /// Prompt tokens of all requests of the worker.
    pub(super) active_tokens: u64,
    /// Cached tokens of this prompt.
    pub(super) cached_tokens: u32,
    /// A random number that breaks ties.
    pub(super) tie: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Formula {
    /// The lowest `prefill blocks + decode blocks`, each with weight 1 and including this request: the default of
    /// Dynamo's KV router.
    DynamoDefault,
    /// The longest cached prefix, whatever the load; then the fewest requests.
    LongestPrefix,
    /// The longest cached prefix if it covers enough of the prompt and loads are balanced, otherwise the fewest
    /// requests: the cache-aware policy of SGLang and SMG.
    PrefixThreshold,
}

/// The defaults of SMG.
const MIN_CACHED_RATIO: f64 = 0.3;
const MAX_LOAD_DIFFERENCE: u32 = 64;
const MAX_LOAD_RATIO: f64 = 1.5;

impl Formula {
    pub(super) fn choose(self, prompt_tokens: u32, workers: &[Candidate]) -> Option<usize> {
        match self {
            Formula::DynamoDefault => least(workers, |it| {
                let new_tokens = u64::from(prompt_tokens.saturating_sub(it.cached_tokens));
                // This prompt's tokens would be active on any worker, so they are left out.
                it.queued_tokens + new_tokens + it.active_tokens
            }),
            Formula::LongestPrefix => longest_prefix(workers),
            Formula::PrefixThreshold => {
                let requests = || workers.iter().map(|it| it.requests);
                let (most, fewest) = (requests().max()?, requests().min()?);
                let is_uneven = most - fewest > MAX_LOAD_DIFFERENCE
                    && f64::from(most) > MAX_LOAD_RATIO * f64::from(fewest);
                let longest = longest_prefix(workers)?;
                let cached = f64::from(workers[longest].cached_tokens);
                if !is_uneven && cached > MIN_CACHED_RATIO * f64::from(prompt_tokens) {
                    Some(longest)
                } else {
                    least(workers, |it| u64::from(it.requests))
                }
            }
        }
    }
}

fn longest_prefix(workers: &[Candidate]) -> Option<usize> {
    least(workers, |it| u64::MAX - u64::from(it.cached_tokens))
}

fn least(workers: &[Candidate], cost: impl Fn(&Candidate) -> u64) -> Option<usize> {
    let indexes = 0..workers.len();
    indexes.min_by_key(|index| {
        let worker = &workers[*index];
        (cost(worker), worker.requests, worker.tie)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(requests: u32, queued_tokens: u64, active_tokens: u64, cached: u32) -> Candidate {
        Candidate {
            requests,
            queued_tokens,
            active_tokens,
            cached_tokens: cached,
            tie: 0,
        }
    }

    #[test]
    fn each_formula_weighs_load_against_prefix() {
        let check = |formula: Formula, workers: &[Candidate], expected| {
            assert_eq!(
                formula.choose(1_000, workers),
                Some(expected),
                "{formula:?}"
            );
        };
        let cached_and_busy = |requests| [worker(0, 0, 0, 0), worker(requests, 500, 800, 900)];
        check(Formula::LongestPrefix, &cached_and_busy(99), 1);
        check(Formula::PrefixThreshold, &cached_and_busy(64), 1);
        check(Formula::PrefixThreshold, &cached_and_busy(65), 0);
        check(Formula::DynamoDefault, &cached_and_busy(1), 0);
        let hardly_cached = [worker(0, 0, 0, 0), worker(1, 0, 50, 300)];
        check(Formula::PrefixThreshold, &hardly_cached, 0);
        check(Formula::DynamoDefault, &hardly_cached, 1);
    }
}
