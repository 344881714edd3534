//! Keys that are easily written in the wrong part of a file. They are unknown keys there; the message says where they
//! belong.

use std::cmp::Reverse;

use super::retired;

/// Keys that their part of the configuration does not have, and where they belong.
const MISPLACED: &[(&str, &str)] = &[
    ("batches.allow_http", OF_S3),
    ("batches.bucket", OF_S3),
    ("batches.endpoint", OF_S3),
    ("batches.prefix", OF_S3),
    ("batches.region", OF_S3),
    ("batches.tls", OF_S3),
    ("limits.batch_tokens_per_day", OF_TENANTS),
    ("limits.batch_tokens_queued", OF_TENANTS),
    ("limits.burst", OF_TENANTS),
    ("limits.concurrent_requests", OF_TENANTS),
    ("limits.input_tokens_per_minute", OF_TENANTS),
    ("limits.max_tokens", OF_TENANTS),
    ("limits.output_tokens_per_minute", OF_TENANTS),
    ("limits.requests_per_minute", OF_TENANTS),
    ("limits.tokens_per_minute", OF_TENANTS),
];

const OF_S3: &str = "it belongs in `batches.s3`";
const OF_TENANTS: &str = "write it in `tenants[].limits`, or in `limits.everybody`";

/// Names that other programs have for a setting, and its name or its path here.
const SYNONYMS: &[(&str, &str)] = &[
    ("address", "listen"),
    ("bind", "listen"),
    ("host", "listen"),
    ("metrics", "admin.listen"),
    ("port", "listen"),
    ("retries", "max_attempts"),
];

/// A message with more paths helps nobody.
const MAX_PATHS: usize = 3;

/// Where the key at `path` belongs, if it is one of these.
pub(super) fn place(path: &str) -> Option<&'static str> {
    retired::entry(MISPLACED, path)
}

/// The paths, in words, of settings and their parts that are called like the unknown key at `path`: those nearest to
/// it in the file, and of these the most alike. `settings` are the paths of all that take a value.
pub(super) fn elsewhere(path: &str, settings: &[String]) -> Option<String> {
    let mut found: Vec<((Reverse<usize>, u8), &str)> = Vec::new();
    for setting in settings {
        // The parts around a setting are keys, too.
        let ends = setting.match_indices('.').map(|(end, _)| end);
        for end in ends.chain([setting.len()]) {
            let place = setting[..end].trim_end_matches("[]");
            if found.iter().all(|(_, known)| *known != place) {
                found.extend(rank(path, place).map(|rank| (rank, place)));
            }
        }
    }
    let best = found.iter().map(|(rank, _)| *rank).min()?;
    found.retain(|(rank, _)| *rank == best);
    // The sort is stable: places that are as deep and whose names are as long keep the order of the reference.
    found.sort_by_key(|(_, place)| (place.matches('.').count(), name(place).len()));
    let paths = found.iter().take(MAX_PATHS);
    let mut paths: Vec<String> = paths.map(|(_, place)| format!("`{place}`")).collect();
    let last = paths.pop()?;
    Some(match &*paths {
        [] => last,
        others => format!("{} or {last}", others.join(", ")),
    })
}

/// How far the key `place` is from the unknown one at `path`, and how unlike it; `None` if it is not alike.
fn rank(path: &str, place: &str) -> Option<(Reverse<usize>, u8)> {
    let (part, key) = path.rsplit_once('.').unwrap_or(("", path));
    let both = steps(part).zip(steps(place));
    let shared = both.take_while(|(own, other)| own == other).count();
    let name = name(place);
    let means_it =
        |(word, meant): &(&str, &str)| *word == key && (*meant == name || *meant == place);
    let is_synonym = (shared > 0 || part.is_empty()) && SYNONYMS.iter().any(means_it);
    let is_plural = name.strip_suffix('s') == Some(key) || key.strip_suffix('s') == Some(name);
    // The distance costs the product of the lengths.
    let is_as_long = key.len() >= 5 && key.len().abs_diff(name.len()) <= 1;
    let unlike = if name == key || is_synonym {
        0
    } else if is_plural || (is_as_long && strsim::damerau_levenshtein(key, name) <= 1) {
        1
    } else if shared > 0 && name.ends_with(&format!("_{key}")) {
        2
    } else {
        return None;
    };
    Some((Reverse(shared), unlike))
}

/// The keys on a path, without the places in lists.
fn steps(path: &str) -> impl Iterator<Item = &str> {
    let steps = path.split('.');
    steps.map(|step| step.split('[').next().unwrap_or_default())
}

fn name(place: &str) -> &str {
    place.rsplit('.').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::{MISPLACED, elsewhere};
    use crate::config::Config;
    use crate::config::reader::{json_schema, leaves};

    #[test]
    fn a_misplaced_key_is_refused_once_with_the_place_where_it_belongs() {
        let check = |rest: &str, expected: &str| {
            let text = format!("workers: ['http://a:1']\n{rest}\n");
            let problems = Config::parse("c.yaml", &text).unwrap_err().to_string();
            assert_eq!(problems, expected);
        };
        check(
            "batches: {bucket: b}",
            "c.yaml:2:11: batches.bucket: unknown key `bucket`; it belongs in `batches.s3`",
        );
        check(
            "limits: {requests_per_minute: 5}",
            "c.yaml:2:10: limits.requests_per_minute: unknown key `requests_per_minute`; write it in `tenants[].limits`, or in `limits.everybody`",
        );
    }

    #[test]
    fn an_unknown_key_is_told_where_settings_of_its_name_are() {
        let settings = leaves(&json_schema::<Config>());
        let check = |path: &str, expected: &[&str]| {
            let paths = elsewhere(path, &settings).unwrap_or_default();
            let paths = paths.replace(" or ", ", ").replace('`', "");
            assert_eq!(paths, expected.join(", "), "{path}");
        };
        check("policy", &["routing.policy", "models[].policy"]);
        let listeners = ["api.listen", "endpoint_picker.listen", "admin.listen"];
        check("listen", &listeners);
        check("port", &listeners);
        check("metrics", &["admin.listen"]);
        check("redis", &["responses.store.redis"]);
        check("keys", &["tenants[].keys", "responses.state_token.keys"]);
        check("polcy", &["routing.policy", "models[].policy"]);
        check("api.port", &["api.listen"]);
        check("api.host", &["api.listen"]);
        check("limits.host", &[]);
        check(
            "requests.timeout",
            &[
                "requests.request_timeout",
                "requests.response_timeout",
                "requests.first_byte_timeout",
            ],
        );
        check("requests.retries", &["requests.max_attempts"]);
        check("responses.store.url", &["responses.store.redis.urls"]);
        check("discovery[0].pods", &["discovery[].kubernetes.pods"]);
        check("discovery[0].consul", &[]);
        check(
            "replicas",
            &[
                "limits.replicas",
                "limits.store.wait.replicas",
                "responses.store.redis.wait.replicas",
            ],
        );
        check(&"x".repeat(100_000), &[]);
    }

    #[test]
    fn a_misplaced_key_is_a_key_of_the_place_where_it_belongs() {
        let known = leaves(&json_schema::<Config>());
        let has = |path: &str| {
            let below = format!("{path}.");
            known
                .iter()
                .any(|key| key == path || key.starts_with(&below))
        };
        for (path, _) in MISPLACED {
            let (part, key) = path.split_once('.').unwrap();
            let home = match part {
                "batches" => "batches.s3",
                "limits" => "limits.everybody",
                other => panic!("{other}: say where its keys belong"),
            };
            assert!(!has(path), "{path}");
            assert!(has(&format!("{home}.{key}")), "{home}.{key}");
        }
    }
}
