//! What becomes of an event after an attempt: delivered, tried again and when, or given up. Pure.

use std::time::Duration;

use super::attempt::Attempt;
use super::settings::Settings;

/// Pauses after the first failed attempts; after more, the last one each time.
const PAUSES_S: [u64; 7] = [5, 30, 120, 600, 1_800, 3_600, 3 * 3_600];
/// How far a pause may differ, so that the events of an outage do not all come back at once.
const JITTER: f64 = 0.2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Delivered,
    RetryIn(Duration),
    /// It is given up, because of its attempts or its age.
    Drop(Reason),
    /// The endpoint takes no events any more.
    DisableEndpoint,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reason {
    Attempts,
    Age,
}

/// After the attempt with this number, 1 for the first, of an event of this age. `random` is from 0 to 1.
pub(super) fn next(
    result: &Attempt,
    attempt: u32,
    age: Duration,
    settings: &Settings,
    random: f64,
) -> Next {
    if result.is_delivered() {
        return Next::Delivered;
    }
    if result.is_gone() {
        return Next::DisableEndpoint;
    }
    if attempt >= settings.max_attempts {
        return Next::Drop(Reason::Attempts);
    }
    let place = (attempt.max(1) as usize - 1).min(PAUSES_S.len() - 1);
    let spread = 1.0 + JITTER * (2.0 * random.clamp(0.0, 1.0) - 1.0);
    let pause = Duration::from_secs(PAUSES_S[place]).mul_f64(spread);
    // It would be dropped instead of claimed again.
    if age + pause >= settings.max_age {
        Next::Drop(Reason::Age)
    } else {
        Next::RetryIn(pause)
    }
}

#[cfg(test)]
mod tests {
    use hyper::StatusCode;
    use proptest::prelude::*;

    use super::*;

    fn answered(status: u16) -> Attempt {
        Attempt::Answered(StatusCode::from_u16(status).unwrap())
    }

    #[test]
    fn an_attempt_leads_to_a_pause_or_an_end() {
        let check = |result: Attempt, attempt: u32, age_s: u64, expected: Next| {
            let age = Duration::from_secs(age_s);
            let found = next(&result, attempt, age, &Settings::default(), 0.5);
            assert_eq!(found, expected, "{result}, attempt {attempt}, {age_s} s");
        };
        let pause = |seconds| Next::RetryIn(Duration::from_secs(seconds));
        check(answered(200), 1, 0, Next::Delivered);
        check(answered(204), 40, 0, Next::Delivered);
        check(answered(410), 1, 0, Next::DisableEndpoint);
        for status in [301, 302, 307, 308, 304, 400, 401, 404, 429, 500, 503] {
            check(answered(status), 1, 0, pause(5));
        }
        check(Attempt::TimedOut, 1, 15, pause(5));
        check(Attempt::TimedOut, 2, 30, pause(30));
        check(Attempt::TimedOut, 3, 100, pause(120));
        check(Attempt::TimedOut, 4, 300, pause(600));
        check(Attempt::TimedOut, 5, 900, pause(1_800));
        check(Attempt::TimedOut, 6, 3_000, pause(3_600));
        check(Attempt::TimedOut, 7, 9_000, pause(10_800));
        check(Attempt::TimedOut, 30, 9_000, pause(10_800));
        check(Attempt::TimedOut, 40, 9_000, Next::Drop(Reason::Attempts));
        check(Attempt::TimedOut, 20, 70 * 3_600, Next::Drop(Reason::Age));
    }

    proptest! {
        /// An endpoint that never takes an event is asked for three days, no more often than the pauses say, and then
        /// left alone.
        #[test]
        fn retries_end(randoms in prop::collection::vec(0.0_f64..=1.0, 64)) {
            let settings = Settings::default();
            let (mut age, mut attempt) = (Duration::ZERO, 0);
            let end = loop {
                attempt += 1;
                let random = randoms[attempt as usize % randoms.len()];
                match next(&Attempt::TimedOut, attempt, age, &settings, random) {
                    Next::RetryIn(pause) => {
                        let named = PAUSES_S[(attempt as usize - 1).min(6)] as f64;
                        let ratio = pause.as_secs_f64() / named;
                        prop_assert!((0.8..=1.2).contains(&ratio), "{}", ratio);
                        age += pause;
                    }
                    end => break end,
                }
            };
            prop_assert_eq!(end, Next::Drop(Reason::Age));
            prop_assert!(age < settings.max_age && attempt > 20 && attempt <= settings.max_attempts);
        }
    }
}
