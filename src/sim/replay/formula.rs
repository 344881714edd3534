//! How others choose, as far as it is published: for comparison only. These are models of their
//! formulas; everything around them (what is known of caches and loads) is the same for all.

use serde::Serialize;

/// A worker as the formulas see it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Candidate {
    pub(super) requests: u32,
    /// Uncached prompt tokens that it has not computed yet.
    pub(super) pending_tokens: u64,
    /// Prompt tokens of all its requests.
    pub(super) active_tokens: u64,
    /// Of this prompt.
    pub(super) cached_tokens: u32,
    /// In a random order.
    pub(super) tie: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Formula {
    /// The least `prefill blocks + decode blocks`, each with the weight 1, this request included:
    /// what Dynamo's KV router does unless it is told otherwise.
    DynamoDefault,
    /// Who holds the most, whatever its load; among equals, the fewest requests.
    LongestPrefix,
    /// Who holds the most, if that is much of the prompt; unless loads differ much, then the fewest
    /// requests. The shape of SGLang's and SMG's cache-aware policy.
    PrefixThreshold,
}

/// As SMG's command line has them where nothing is said.
const SHARE_MIN: f64 = 0.3;
const DIFFERENCE_MAX: u32 = 64;
const RATIO_MAX: f64 = 1.5;

impl Formula {
    pub(super) fn choose(self, prompt_tokens: u32, workers: &[Candidate]) -> Option<usize> {
        match self {
            Formula::DynamoDefault => least(workers, |it| {
                let new_tokens = u64::from(prompt_tokens.saturating_sub(it.cached_tokens));
                // This prompt's own tokens count as active wherever it goes.
                it.pending_tokens + new_tokens + it.active_tokens
            }),
            Formula::LongestPrefix => warmest(workers),
            Formula::PrefixThreshold => {
                let requests = || workers.iter().map(|it| it.requests);
                let (most, fewest) = (requests().max()?, requests().min()?);
                let is_uneven = most - fewest > DIFFERENCE_MAX
                    && f64::from(most) > RATIO_MAX * f64::from(fewest);
                let warmest = warmest(workers)?;
                let held = f64::from(workers[warmest].cached_tokens);
                if !is_uneven && held > SHARE_MIN * f64::from(prompt_tokens) {
                    Some(warmest)
                } else {
                    least(workers, |it| u64::from(it.requests))
                }
            }
        }
    }
}

fn warmest(workers: &[Candidate]) -> Option<usize> {
    least(workers, |it| u64::MAX - u64::from(it.cached_tokens))
}

fn least(workers: &[Candidate], cost: impl Fn(&Candidate) -> u64) -> Option<usize> {
    let places = 0..workers.len();
    places.min_by_key(|place| {
        let worker = &workers[*place];
        (cost(worker), worker.requests, worker.tie)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(requests: u32, pending_tokens: u64, active_tokens: u64, cached: u32) -> Candidate {
        Candidate {
            requests,
            pending_tokens,
            active_tokens,
            cached_tokens: cached,
            tie: 0,
        }
    }

    #[test]
    fn each_formula_weighs_load_and_prefix_in_its_way() {
        let check = |formula: Formula, workers: &[Candidate], expected| {
            assert_eq!(
                formula.choose(1_000, workers),
                Some(expected),
                "{formula:?}"
            );
        };
        let warm_and_busy = |requests| [worker(0, 0, 0, 0), worker(requests, 500, 800, 900)];
        check(Formula::LongestPrefix, &warm_and_busy(99), 1);
        check(Formula::PrefixThreshold, &warm_and_busy(64), 1);
        check(Formula::PrefixThreshold, &warm_and_busy(65), 0);
        check(Formula::DynamoDefault, &warm_and_busy(1), 0);
        let hardly_warm = [worker(0, 0, 0, 0), worker(1, 0, 50, 300)];
        check(Formula::PrefixThreshold, &hardly_warm, 0);
        check(Formula::DynamoDefault, &hardly_warm, 1);
    }
}
