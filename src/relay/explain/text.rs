//! Explains a decision in one sentence. No I/O.

use std::borrow::Cow;

use crate::relay::account::explanation::Score;
use crate::relay::choose::chosen::NotDisaggregated;
use crate::routing::pair::LocalReason;
use crate::routing::{Cached, Reason};

impl Score {
    /// The worker's name, with its rank if requests are pinned to it.
    fn name(&self) -> Cow<'_, str> {
        match self.rank {
            None => Cow::Borrowed(&self.worker),
            Some(rank) => Cow::Owned(format!("{} rank {rank}", self.worker)),
        }
    }
}

pub(super) fn chosen(reason: Reason, chosen: &Score, all: &[Score], prompt_tokens: u32) -> String {
    let Score {
        cached_tokens,
        queued_tokens,
        requests,
        ..
    } = chosen;
    let mut prefix = format!("{cached_tokens} of {prompt_tokens} prompt tokens are cached");
    let Cached { gpu, cpu, disk } = chosen.cached;
    if cpu + disk > 0 {
        prefix += &format!(" (GPU {gpu}, CPU {cpu}, disk {disk})");
    }
    let mut text = match reason {
        Reason::LongestPrefix => format!("longest cached prefix: {prefix}"),
        Reason::LowerCost => {
            let others = all
                .iter()
                .filter(|score| score.is_usable && score.name() != chosen.name());
            let best_cached = others.min_by_key(|other| other.new_tokens).map(|other| {
                format!(
                    "; {} has {} cached and {} queued tokens",
                    other.name(),
                    other.cached_tokens,
                    other.queued_tokens
                )
            });
            format!("lowest cost: {prefix}{}", best_cached.unwrap_or_default())
        }
        Reason::Cold => format!(
            "no worker has any of the prompt cached; this one has the lowest cost, with {queued_tokens} queued tokens{}",
            of_peers(chosen.load.peers.queued_tokens)
        ),
        Reason::PrefixHash => format!(
            "no other replica is connected, so the hash of the prompt's first blocks chose among workers of nearly the lowest cost: {prefix}"
        ),
        Reason::AffinityOverflow => format!(
            "the workers that the session affinity key prefers have too many requests; this one has {requests}"
        ),
        Reason::Affinity => "the session affinity key hashes to this worker".to_owned(),
        Reason::RoundRobin => "the next worker in round-robin order".to_owned(),
        Reason::Random => "drawn at random".to_owned(),
        Reason::LeastLoad => format!(
            "fewest requests in flight: {requests}{}",
            of_peers(chosen.load.peers.requests.into())
        ),
    };
    if matches!(
        reason,
        Reason::LongestPrefix | Reason::LowerCost | Reason::Cold
    ) {
        text += &in_milliseconds(chosen);
    }
    if !chosen.is_trusted {
        text += "; its cache is predicted, because its engine's tokens differ from the router's (tokenizer mismatch)";
    }
    text
}

/// The cost's terms that are not nothing, at a worker with so many requests.
fn in_milliseconds(chosen: &Score) -> String {
    let terms = &chosen.cost_terms_ms;
    let named = [
        (terms.wait, "to wait".to_owned()),
        (terms.compute, "to compute".to_owned()),
        (terms.delay, of_delayed(chosen)),
        (terms.answer, "of answers slowed".to_owned()),
        (terms.slot, "until a slot is free".to_owned()),
        (terms.adapter, "to load the adapter".to_owned()),
    ];
    let shown = named
        .iter()
        .filter(|(milliseconds, _)| *milliseconds >= 0.5);
    let shown: Vec<String> = shown
        .map(|(milliseconds, text)| format!("{milliseconds:.0} ms {text}"))
        .collect();
    if shown.is_empty() {
        return String::new();
    }
    format!("; {}", shown.join(", "))
}

fn of_delayed(chosen: &Score) -> String {
    let Score {
        requests,
        usual_requests,
        ..
    } = chosen;
    let own = match requests {
        0 => None,
        1 => Some("its 1 request".to_owned()),
        count => Some(format!("its {count} requests")),
    };
    let has_more = *usual_requests > f64::from(*requests) + 1.0;
    match (own, has_more) {
        (None, false) => "of delay for requests that come while the prompt is computed".to_owned(),
        (None, true) => format!(
            "of delay for some of its usual {usual_requests:.0} requests and those behind them"
        ),
        (Some(own), false) => format!("of delay for {own} and those behind them"),
        (Some(own), true) => format!(
            "of delay for {own}, some of its usual {usual_requests:.0}, and those behind them"
        ),
    }
}

/// How much of a load other replicas have.
fn of_peers(count: u64) -> String {
    match count {
        0 => String::new(),
        count => format!(" ({count} of other replicas)"),
    }
}

/// Why a request has no prefill leg.
pub(super) fn not_disaggregated(reason: NotDisaggregated, min_remote_tokens: u32) -> String {
    match reason {
        NotDisaggregated::Local(LocalReason::PrefixCached) => format!(
            "fewer than {min_remote_tokens} prompt tokens are not cached at the decode worker, so it computes them itself"
        ),
        NotDisaggregated::Local(LocalReason::ShortPrompt) => format!(
            "the prompt has fewer than {min_remote_tokens} tokens, so the decode worker computes it itself"
        ),
        NotDisaggregated::Local(LocalReason::NoPrefillWorker) => {
            "no prefill worker is usable now".to_owned()
        }
        NotDisaggregated::Local(LocalReason::NoPair) => {
            "no usable prefill worker can transfer KV blocks to the decode worker".to_owned()
        }
        NotDisaggregated::Request(reason) => {
            format!("the request must run on one worker ({})", reason.as_str())
        }
        NotDisaggregated::Failed => {
            "prefill legs or KV transfers of this request failed before".to_owned()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::load::LoadShare;
    use crate::http::circuit_breaker::State;
    use crate::relay::account::explanation::{LoadShares, SpeedExplained};
    use crate::relay::prompt::cached_prefix::PrefixSource;
    use crate::routing::cost::Terms;

    fn score(worker: &str, cached: Cached, queued_tokens: u64) -> Score {
        Score {
            worker: worker.to_owned(),
            client_name: None,
            rank: None,
            is_usable: true,
            unusable_reason: None,
            circuit_breaker: State::Closed,
            requests: 3,
            usual_requests: 3.0,
            queued_tokens,
            context_tokens: 0,
            slots: 256,
            waiting: 0,
            speed: SpeedExplained::default(),
            load: LoadShares::default(),
            cached,
            cached_tokens: cached.tokens(),
            known_by: PrefixSource::Exact,
            trees: Vec::new(),
            is_trusted: true,
            new_tokens: 2_048 - cached.gpu,
            cost_ms: 0.0,
            cost_terms_ms: Terms::default(),
            expected_first_token_ms: 0.0,
            expected_end_ms: 0.0,
        }
    }

    #[test]
    fn each_reason_is_one_sentence() {
        let check = |reason, scores: &[Score], expected: &str| {
            assert_eq!(chosen(reason, &scores[0], scores, 2_048), expected);
        };
        let gpu = Cached::in_gpu;
        check(
            Reason::LongestPrefix,
            &[score("a", gpu(1_920), 0), score("b", gpu(0), 0)],
            "longest cached prefix: 1920 of 2048 prompt tokens are cached",
        );
        let in_all_tiers = Cached {
            gpu: 512,
            cpu: 512,
            disk: 64,
        };
        check(
            Reason::LongestPrefix,
            &[score("a", in_all_tiers, 0)],
            "longest cached prefix: 1088 of 2048 prompt tokens are cached (GPU 512, CPU 512, disk 64)",
        );
        check(
            Reason::LowerCost,
            &[score("a", gpu(0), 0), score("b", gpu(2_000), 30_000)],
            "lowest cost: 0 of 2048 prompt tokens are cached; b has 2000 cached and 30000 queued tokens",
        );
        check(
            Reason::Cold,
            &[score("a", gpu(0), 12), score("b", gpu(0), 500)],
            "no worker has any of the prompt cached; this one has the lowest cost, with 12 queued tokens",
        );
        check(
            Reason::LeastLoad,
            &[score("a", gpu(0), 0)],
            "fewest requests in flight: 3",
        );
        let mut shared = score("a", gpu(0), 12);
        shared.load.peers = LoadShare {
            requests: 2,
            queued_tokens: 7,
            context_tokens: 0,
        };
        check(
            Reason::LeastLoad,
            &[shared],
            "fewest requests in flight: 3 (2 of other replicas)",
        );
    }

    #[test]
    fn an_untrusted_worker_is_named_as_predicted() {
        let mut scores = [score("a", Cached::in_gpu(2_048), 0)];
        scores[0].is_trusted = false;
        let text = chosen(Reason::LongestPrefix, &scores[0], &scores, 2_048);
        assert!(text.ends_with("(tokenizer mismatch)"));
    }

    #[test]
    fn the_terms_of_the_cost_are_named_in_milliseconds() {
        let mut scores = [score("a", Cached::in_gpu(0), 12)];
        scores[0].cost_terms_ms = Terms {
            wait: 1.0,
            compute: 170.4,
            delay: 682.0,
            answer: 0.2,
            slot: 0.0,
            adapter: 80.0,
        };
        let text = chosen(Reason::Cold, &scores[0], &scores, 2_048);
        assert!(
            text.ends_with(
                "; 1 ms to wait, 170 ms to compute, 682 ms of delay for its 3 requests and those behind them, 80 ms to load the adapter"
            ),
            "{text}"
        );
    }

    #[test]
    fn a_delay_names_the_requests_that_have_it() {
        let check = |requests, usual_requests, expected: &str| {
            let mut row = score("a", Cached::in_gpu(0), 0);
            (row.requests, row.usual_requests) = (requests, usual_requests);
            assert_eq!(of_delayed(&row), expected);
        };
        check(
            0,
            0.4,
            "of delay for requests that come while the prompt is computed",
        );
        check(
            0,
            4.0,
            "of delay for some of its usual 4 requests and those behind them",
        );
        check(1, 1.0, "of delay for its 1 request and those behind them");
        check(
            2,
            6.0,
            "of delay for its 2 requests, some of its usual 6, and those behind them",
        );
    }

    #[test]
    fn a_missing_prefill_leg_is_explained() {
        let text = |reason| not_disaggregated(NotDisaggregated::Local(reason), 1_024);
        assert_eq!(
            text(LocalReason::PrefixCached),
            "fewer than 1024 prompt tokens are not cached at the decode worker, so it computes them itself"
        );
        assert_eq!(
            text(LocalReason::ShortPrompt),
            "the prompt has fewer than 1024 tokens, so the decode worker computes it itself"
        );
        assert!(text(LocalReason::NoPrefillWorker).starts_with("no prefill worker"));
    }
}
