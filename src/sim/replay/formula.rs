//! Models of the published routing formulas of other routers, for comparison only. They get the same knowledge of caches
//! and loads as this router's policies. Pure.

use crate::observe::metrics::words;

words! {
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) enum Formula {
        /// The lowest `prefill blocks + decode blocks`, each with weight 1 and including this request: the default of
        /// Dynamo's KV router.
        DynamoDefault = "dynamo_default",
        /// The longest cached prefix, whatever the load; then the fewest requests.
        LongestPrefix = "longest_prefix",
        /// The longest cached prefix if it covers enough of the prompt and loads are balanced, otherwise the fewest
        /// requests: the cache-aware policy of SGLang and SMG.
        PrefixThreshold = "prefix_threshold",
        /// Any of the workers with the longest cached prefix if it covers more than half of the prompt and loads are balanced,
        /// otherwise the fewest requests: the cache-aware policy of vLLM's router.
        VllmRouter = "vllm_router",
        /// The lowest product of prompt tokens to wait for and to compute, and requests: LMetric (arXiv 2603.15202).
        Lmetric = "lmetric",
        /// The highest sum of scores of the cached prefix, the queue and the KV memory, weighed 3 to 2 to 2: llm-d's
        /// scheduler.
        LlmD = "llm_d",
    }
}

/// A worker as the formulas see it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Candidate {
    /// All requests there: waiting, computing, generating.
    pub(super) requests: u32,
    /// Queued prefill tokens.
    pub(super) queued_tokens: u64,
    /// Prompt tokens of all requests of the worker.
    pub(super) active_tokens: u64,
    /// Cached tokens of this prompt.
    pub(super) cached_tokens: u32,
    /// By the engine's own metrics: requests that wait, and the used part of the KV memory.
    pub(super) waiting: u32,
    pub(super) kv_usage: f64,
    /// A random number that breaks ties.
    pub(super) tie: u64,
}

/// The defaults of SMG.
const MIN_CACHED_RATIO: f64 = 0.3;
const MAX_LOAD_DIFFERENCE: u32 = 64;
const MAX_LOAD_RATIO: f64 = 1.5;
/// The default of vLLM's router.
const VLLM_MIN_CACHED_RATIO: f64 = 0.5;
/// Weights of llm-d's scores.
const LLM_D_PREFIX: f64 = 3.0;
const LLM_D_QUEUE: f64 = 2.0;
const LLM_D_KV_MEMORY: f64 = 2.0;

impl Formula {
    pub(super) fn choose(self, prompt_tokens: u32, workers: &[Candidate]) -> Option<usize> {
        let new_tokens =
            |worker: &Candidate| u64::from(prompt_tokens.saturating_sub(worker.cached_tokens));
        match self {
            Formula::DynamoDefault => least(workers, |worker| {
                // This prompt's tokens would be active on any worker, so they are left out.
                worker.queued_tokens + new_tokens(worker) + worker.active_tokens
            }),
            Formula::LongestPrefix => longest_prefix(workers),
            Formula::PrefixThreshold => {
                let longest = longest_prefix(workers)?;
                prefix_or_load(prompt_tokens, longest, MIN_CACHED_RATIO, workers)
            }
            Formula::VllmRouter => {
                let indexes = 0..workers.len();
                let any_longest = indexes
                    .max_by_key(|index| (workers[*index].cached_tokens, workers[*index].tie))?;
                prefix_or_load(prompt_tokens, any_longest, VLLM_MIN_CACHED_RATIO, workers)
            }
            Formula::Lmetric => least(workers, |worker| {
                (worker.queued_tokens + new_tokens(worker)) * u64::from(worker.requests + 1)
            }),
            Formula::LlmD => llm_d(prompt_tokens, workers),
        }
    }
}

/// A worker with the longest cached prefix if loads are balanced and the prefix is more than this part of the prompt,
/// otherwise the worker with the fewest requests.
fn prefix_or_load(
    prompt_tokens: u32,
    longest: usize,
    min_ratio: f64,
    workers: &[Candidate],
) -> Option<usize> {
    let requests = || workers.iter().map(|worker| worker.requests);
    let most = requests().max().unwrap_or(0);
    let fewest = requests().min().unwrap_or(0);
    let is_uneven =
        most - fewest > MAX_LOAD_DIFFERENCE && f64::from(most) > MAX_LOAD_RATIO * f64::from(fewest);
    let cached = f64::from(workers[longest].cached_tokens);
    if !is_uneven && cached > min_ratio * f64::from(prompt_tokens) {
        Some(longest)
    } else {
        least(workers, |worker| u64::from(worker.requests))
    }
}

fn llm_d(prompt_tokens: u32, workers: &[Candidate]) -> Option<usize> {
    let waiting = || workers.iter().map(|worker| worker.waiting);
    let (shortest, longest) = (waiting().min()?, waiting().max()?);
    lowest(workers, |worker| {
        let prefix = f64::from(worker.cached_tokens) / f64::from(prompt_tokens.max(1));
        let queue = match longest - shortest {
            0 => 1.0,
            range => f64::from(longest - worker.waiting) / f64::from(range),
        };
        let kv_memory = 1.0 - worker.kv_usage;
        -(LLM_D_PREFIX * prefix + LLM_D_QUEUE * queue + LLM_D_KV_MEMORY * kv_memory)
    })
}

fn longest_prefix(workers: &[Candidate]) -> Option<usize> {
    least(workers, |worker| u64::MAX - u64::from(worker.cached_tokens))
}

fn least(workers: &[Candidate], cost: impl Fn(&Candidate) -> u64) -> Option<usize> {
    let indexes = 0..workers.len();
    indexes.min_by_key(|index| {
        let worker = &workers[*index];
        (cost(worker), worker.requests, worker.tie)
    })
}

fn lowest(workers: &[Candidate], cost: impl Fn(&Candidate) -> f64) -> Option<usize> {
    let costs = workers.iter().map(|worker| (cost(worker), worker.tie));
    let lowest = costs
        .enumerate()
        .min_by(|(_, one), (_, other)| one.0.total_cmp(&other.0).then(one.1.cmp(&other.1)));
    lowest.map(|(index, _)| index)
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
            ..Candidate::default()
        }
    }

    fn check(formula: Formula, workers: &[Candidate], expected: usize) {
        let chosen = formula.choose(1_000, workers);
        assert_eq!(chosen, Some(expected), "{formula:?}");
    }

    #[test]
    fn each_formula_weighs_load_against_prefix() {
        let cached_and_busy = |requests| [worker(0, 0, 0, 0), worker(requests, 500, 800, 900)];
        check(Formula::LongestPrefix, &cached_and_busy(99), 1);
        check(Formula::PrefixThreshold, &cached_and_busy(64), 1);
        check(Formula::PrefixThreshold, &cached_and_busy(65), 0);
        check(Formula::DynamoDefault, &cached_and_busy(1), 0);
        check(Formula::Lmetric, &cached_and_busy(0), 1);
        check(Formula::Lmetric, &cached_and_busy(1), 0);
        let hardly_cached = [worker(0, 0, 0, 0), worker(1, 0, 50, 300)];
        check(Formula::PrefixThreshold, &hardly_cached, 0);
        check(Formula::DynamoDefault, &hardly_cached, 1);
        let half_cached = [worker(0, 0, 0, 0), worker(1, 0, 50, 500)];
        check(Formula::PrefixThreshold, &half_cached, 1);
        check(Formula::VllmRouter, &half_cached, 0);
    }

    #[test]
    fn llm_d_weighs_a_prefix_against_the_queue_and_the_memory_that_engines_report() {
        let engines = |waiting, kv_usage| {
            let cached = Candidate {
                waiting,
                kv_usage,
                ..worker(1, 0, 0, 900)
            };
            [worker(1, 0, 0, 0), cached]
        };
        check(Formula::LlmD, &engines(0, 0.9), 1);
        check(Formula::LlmD, &engines(5, 0.3), 1);
        check(Formula::LlmD, &engines(5, 0.5), 0);
    }
}
