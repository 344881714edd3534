//! Keys that are easily written in the wrong part of a file. They are unknown keys there; the message says where they
//! belong.

use super::retired;

/// A part of the configuration, keys that it does not have, and where these belong.
const MISPLACED: &[(&str, &[&str], &str)] = &[
    (
        "batches",
        &[
            "allow_http",
            "bucket",
            "endpoint",
            "prefix",
            "region",
            "tls",
        ],
        "it belongs in `batches.s3`",
    ),
    (
        "limits",
        &[
            "batch_tokens_per_day",
            "batch_tokens_queued",
            "burst",
            "concurrent_requests",
            "input_tokens_per_minute",
            "max_tokens",
            "output_tokens_per_minute",
            "requests_per_minute",
            "tokens_per_minute",
        ],
        "write it in `tenants[].limits`, or in `limits.everybody`",
    ),
];

/// Where the key at `path` belongs, if it is one of these.
pub(super) fn place(path: &str) -> Option<&'static str> {
    retired::entry(MISPLACED, path)
}

#[cfg(test)]
mod tests {
    use super::MISPLACED;
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
    fn a_misplaced_key_is_a_key_of_the_place_where_it_belongs() {
        let known = leaves(&json_schema::<Config>());
        let has = |path: &str| {
            let below = format!("{path}.");
            known
                .iter()
                .any(|key| key == path || key.starts_with(&below))
        };
        for (part, keys, _) in MISPLACED {
            let home = match *part {
                "batches" => "batches.s3",
                "limits" => "limits.everybody",
                other => panic!("{other}: say where its keys belong"),
            };
            for key in *keys {
                assert!(!has(&format!("{part}.{key}")), "{part}.{key}");
                assert!(has(&format!("{home}.{key}")), "{home}.{key}");
            }
        }
    }
}
