//! A decision in words. Pure.

use super::Score;
use crate::relay::choice::Unsplit;
use crate::routing::Reason;
use crate::routing::pair::LocalReason;

/// Why a worker was chosen, for somebody who has not read how.
pub(super) fn why(reason: Reason, chosen: &Score, all: &[Score], prompt_tokens: u32) -> String {
    let others = || {
        let others = all.iter();
        others.filter(|it| it.is_usable && it.worker != chosen.worker)
    };
    let mut text = match reason {
        Reason::LongestPrefix => holds(chosen, prompt_tokens),
        Reason::LowerCost => {
            let warmest = others().min_by_key(|it| it.new_tokens);
            let mut text = holds(chosen, prompt_tokens);
            if let Some(warmest) = warmest {
                text += &format!(
                    "; {} holds {} of them, but has {} to do before it",
                    warmest.worker,
                    number(warmest.cached_tokens),
                    work(warmest)
                );
            }
            text
        }
        Reason::Cold => format!(
            "nobody holds any of the {} prompt tokens; of those looked at, it has the least to do ({})",
            number(prompt_tokens),
            work(chosen)
        ),
        Reason::Affinity => {
            "requests with this key go to it, as long as it can take them".to_owned()
        }
        Reason::RoundRobin => "it is its turn".to_owned(),
        Reason::Random => "it was drawn".to_owned(),
        Reason::LeastLoad => format!(
            "of those looked at, it has the fewest requests ({})",
            number(chosen.requests)
        ),
    };
    let next = others().min_by(|a, b| a.cost.total_cmp(&b.cost));
    match (reason, next) {
        (Reason::LongestPrefix | Reason::Cold, None) => text += "; there is no other",
        (Reason::LongestPrefix, Some(next)) => text += &beside(chosen, next),
        _ => {}
    }
    if !chosen.is_trusted {
        text +=
            "; predicted from what it was sent, since its engine has other tokens than this router";
    }
    text
}

/// Why a worker computes the prompt itself.
pub(super) fn not_split(why: Unsplit, remote_prefill_min_tokens: u32) -> String {
    let text = match why {
        Unsplit::Workers(LocalReason::PrefixCached) => {
            return format!(
                "it would compute fewer than {} tokens itself, which is not worth a second worker",
                number(remote_prefill_min_tokens)
            );
        }
        Unsplit::Workers(LocalReason::NoPrefillWorker) => "no prefill worker can be used now",
        Unsplit::Workers(LocalReason::NoPair) => {
            "no prefill worker that can be used now is known to fit the worker chosen"
        }
        Unsplit::Request(why) => {
            return format!("the request must run on one worker ({})", why.as_str());
        }
        Unsplit::Failed => "its handoffs have failed",
    };
    text.to_owned()
}

fn holds(chosen: &Score, prompt_tokens: u32) -> String {
    let mut text = format!(
        "holds {} of {} prompt tokens",
        number(chosen.cached_tokens),
        number(prompt_tokens)
    );
    for (tokens, place) in [
        (chosen.cached.cpu, "CPU memory"),
        (chosen.cached.disk, "disk"),
    ] {
        if tokens > 0 {
            text += &format!(", {} of them to be brought from {place}", number(tokens));
        }
    }
    text
}

/// The cheapest of the others.
fn beside(chosen: &Score, next: &Score) -> String {
    let name = &next.worker;
    match i64::from(next.new_tokens) - i64::from(chosen.new_tokens) {
        0 if next.cost > chosen.cost => {
            format!(
                "; as much as {name}, which has {} to do before it",
                work(next)
            )
        }
        0 => format!("; as much as {name}, and the draw between equals was for it"),
        more if more > 0 => format!(
            "; the next best, {name}, would compute {} more",
            number(more)
        ),
        fewer => format!(
            "; {name} would compute {} fewer, but has {} to do before it",
            number(-fewer),
            work(next)
        ),
    }
}

fn work(worker: &Score) -> String {
    format!("{} tokens", number(worker.queued_tokens))
}

/// With commas.
fn number(number: impl Into<i128>) -> String {
    let digits = number.into().to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::circuit_breaker;
    use crate::relay::PrefixSource;
    use crate::routing::{Cached, Request, Settings, State, cost};

    fn score(name: &str, cached: Cached, queued_tokens: u64) -> Score {
        let state = State {
            is_usable: true,
            queued_tokens,
            ..State::default()
        };
        let request = Request {
            prompt_tokens: 2_048,
            ..Request::default()
        };
        let settings = Settings::default();
        let new_tokens = cost::new_tokens(&settings, &request, &cached);
        let cost_terms = cost::terms(&settings, &state, new_tokens);
        Score {
            worker: name.to_owned(),
            is_usable: true,
            unusable_because: None,
            breaker: circuit_breaker::State::Closed,
            requests: 3,
            queued_tokens,
            decode_tokens: 0,
            cached,
            cached_tokens: cached.tokens(),
            known_by: PrefixSource::Exact,
            trees: Vec::new(),
            is_trusted: true,
            new_tokens,
            cost: cost_terms.sum(),
            cost_terms,
        }
    }

    fn said(reason: Reason, scores: &[Score]) -> String {
        why(reason, &scores[0], scores, 2_048)
    }

    #[test]
    fn it_says_what_is_held_and_what_the_next_best_would_have_to_do() {
        let held = Cached::in_gpu;
        let check = |reason, scores: &[Score], expected| assert_eq!(said(reason, scores), expected);
        check(
            Reason::LongestPrefix,
            &[
                score("gpu-0", held(1_920), 0),
                score("gpu-2", held(0), 0),
                score("gpu-1", held(384), 9),
            ],
            "holds 1,920 of 2,048 prompt tokens; the next best, gpu-1, would compute 1,536 more",
        );
        let lower = Cached {
            gpu: 512,
            cpu: 512,
            disk: 64,
        };
        check(
            Reason::LongestPrefix,
            &[score("gpu-0", lower, 0)],
            "holds 1,088 of 2,048 prompt tokens, 512 of them to be brought from CPU memory, 64 of them to be brought from disk; there is no other",
        );
        check(
            Reason::LongestPrefix,
            &[score("a", held(16), 0), score("b", held(16), 1_000_000)],
            "holds 16 of 2,048 prompt tokens; as much as b, which has 1,000,000 tokens to do before it",
        );
        check(
            Reason::LowerCost,
            &[score("a", held(0), 0), score("b", held(2_000), 30_000)],
            "holds 0 of 2,048 prompt tokens; b holds 2,000 of them, but has 30,000 tokens to do before it",
        );
        check(
            Reason::Cold,
            &[score("a", held(0), 12), score("b", held(0), 500)],
            "nobody holds any of the 2,048 prompt tokens; of those looked at, it has the least to do (12 tokens)",
        );
        check(
            Reason::LeastLoad,
            &[score("a", held(0), 0)],
            "of those looked at, it has the fewest requests (3)",
        );
    }

    #[test]
    fn it_says_why_a_worker_computes_the_prompt_itself() {
        let said = |why| not_split(why, 1_024);
        assert_eq!(
            said(Unsplit::Workers(LocalReason::PrefixCached)),
            "it would compute fewer than 1,024 tokens itself, which is not worth a second worker"
        );
        assert!(
            said(Unsplit::Workers(LocalReason::NoPrefillWorker)).starts_with("no prefill worker")
        );
    }

    #[test]
    fn it_says_when_events_do_not_count() {
        let mut scores = [score("a", Cached::in_gpu(2_048), 0)];
        scores[0].is_trusted = false;
        assert!(said(Reason::LongestPrefix, &scores).ends_with("other tokens than this router"));
    }
}
