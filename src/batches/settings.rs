//! The `batches` section: where files lie, and how large and how many they may be.

use std::time::Duration;

use hyper::Uri;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::http::tls::ClientSettings;
use crate::units::{DurationText, SizeText};

/// Whether this build can keep files in S3.
pub const HAS_S3: bool = cfg!(feature = "s3");

/// Work that can wait: the Files and Batches APIs, and Anthropic's Message Batches. They need storage: `folder` or
/// `s3`. Without either there are none.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// A folder for files and results, which is made if it is not there. For one router, or for several that mount the
    /// same folder. Empty: none.
    pub folder: String,
    /// Storage that speaks S3, for several routers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub s3: Option<S3Settings>,
    /// A larger file is answered with 413. Files are streamed: memory does not grow with them.
    #[serde(with = "SizeText")]
    #[schemars(extend("min" = "1KiB", "max" = "64GiB"))]
    pub max_file_size: u64,
    /// A batch whose input has more lines fails its validation.
    #[schemars(range(min = 1, max = 10_000_000))]
    pub max_lines: u32,
    /// Bytes of one tenant's files together, those with results too. An upload beyond them is refused, and a batch from
    /// a file while they are exceeded.
    #[serde(with = "SizeText")]
    #[schemars(extend("min" = "1KiB"))]
    pub max_size_per_tenant: u64,
    /// Files and batches are deleted this long after they were created. A client may ask for less time for a file. A
    /// `completion_window` is at most half of it.
    #[serde(with = "DurationText")]
    #[schemars(extend("min" = "48h", "max" = "365d"))]
    pub retention: Duration,
}

/// A bucket. Credentials are those of the environment: `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, or the role of
/// the pod, task or machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct S3Settings {
    /// The bucket, which must exist. A rule of its life cycle should end incomplete multipart uploads after a day: a
    /// router that is killed leaves its own behind.
    pub bucket: String,
    /// What the names of all objects begin with, such as `router/prod`. Fleets that share a bucket need one each.
    pub prefix: String,
    /// The URL of a server other than Amazon's, such as `http://minio:9000`. Empty: that of the environment
    /// (`AWS_ENDPOINT_URL`), or Amazon's.
    pub endpoint: String,
    /// Such as `eu-central-1`. Empty: that of the environment (`AWS_REGION`), or `us-east-1`.
    pub region: String,
    /// Whether `endpoint` may be `http`, so that anyone on the way can read and change files.
    pub allow_http: bool,
    /// TLS of the connection to an `https` URL. Left out: with the CA certificates of the operating system.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<ClientSettings>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            folder: String::new(),
            s3: None,
            // 200,000 lines of 5 KB. OpenAI takes 200 MB and 50,000 lines.
            max_file_size: 1 << 30,
            // Each has 30 bytes in memory while a batch is checked or put together.
            max_lines: 200_000,
            // OpenAI's is 100 GB for an organization.
            max_size_per_tenant: 100 << 30,
            // As OpenAI keeps the files of batches.
            retention: Duration::from_secs(30 * 24 * 3_600),
        }
    }
}

impl Settings {
    /// Whether there are batches and files at all.
    pub fn is_on(&self) -> bool {
        !self.folder.is_empty() || self.s3.is_some()
    }

    /// What is wrong beyond types and bounds: paths below `batches`, each with a message.
    pub fn check(&self) -> Vec<(String, String)> {
        let mut problems = Vec::new();
        let mut wrong = |key: &str, message: String| problems.push((key.to_owned(), message));
        let Some(s3) = &self.s3 else {
            return problems;
        };
        if !self.folder.is_empty() {
            let message = "has a `folder` beside it; files lie in one of both";
            wrong("s3", message.to_owned());
        }
        if !HAS_S3 {
            let message = "this build cannot use S3: it was made without the feature `s3`; build from source with \
                           `make dist`, which has all features, or with `cargo build --release --features s3`";
            wrong("s3", message.to_owned());
        }
        for (key, message) in s3.problems() {
            wrong(&format!("s3.{key}"), message);
        }
        problems
    }
}

impl S3Settings {
    fn problems(&self) -> Vec<(&'static str, String)> {
        let mut problems = Vec::new();
        if self.bucket.is_empty() {
            problems.push(("bucket", "is missing".to_owned()));
        }
        let is_odd = |part: &str| part.is_empty() || part == "." || part == "..";
        if !self.prefix.is_empty() && self.prefix.split('/').any(is_odd) {
            let message = format!(
                "`{}` must be names with `/` between them, such as `router/prod`",
                self.prefix
            );
            problems.push(("prefix", message));
        }
        if self.endpoint.is_empty() {
            return problems;
        }
        let endpoint = self.endpoint.parse::<Uri>().ok();
        let endpoint = endpoint.filter(|uri| uri.authority().is_some());
        match endpoint.as_ref().and_then(Uri::scheme_str) {
            Some("https") => {}
            Some("http") if self.tls.is_some() => {
                problems.push(("tls", "is for an `https` URL".to_owned()));
            }
            Some("http") if self.allow_http => {}
            Some("http") => {
                let message = "is `http`, which anyone on the way can read: write an `https` URL, or set \
                               `allow_http: true`";
                problems.push(("endpoint", message.to_owned()));
            }
            Some(_) | None => {
                let message = format!(
                    "`{}` is no URL such as `https://s3.example.com`",
                    self.endpoint
                );
                problems.push(("endpoint", message));
            }
        }
        problems
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_s3(change: fn(&mut S3Settings)) -> Settings {
        let mut s3 = S3Settings {
            bucket: "b".to_owned(),
            ..S3Settings::default()
        };
        change(&mut s3);
        Settings {
            s3: Some(s3),
            ..Settings::default()
        }
    }

    /// What is wrong, but for the build.
    fn problems(settings: &Settings) -> Vec<String> {
        let found = settings.check().into_iter();
        let found = found.filter(|(_, message)| !message.starts_with("this build"));
        found
            .map(|(key, message)| format!("{key}: {message}"))
            .collect()
    }

    #[test]
    fn there_are_batches_once_there_is_storage() {
        let mut settings = Settings::default();
        assert!(!settings.is_on());
        settings.folder = "/var/lib/warmroute".to_owned();
        assert!(settings.is_on());
        assert!(settings.check().is_empty());
        assert!(with_s3(|_| {}).is_on());
    }

    #[test]
    fn wrong_storage_is_refused_with_what_to_write() {
        assert_eq!(problems(&with_s3(|_| {})), [""; 0]);
        let check = |settings: Settings, expected: &str| {
            let found = problems(&settings);
            assert!(
                found.len() == 1 && found[0].contains(expected),
                "{expected}: {found:?}"
            );
        };
        let mut both = with_s3(|_| {});
        both.folder = "f".to_owned();
        check(both, "s3: has a `folder` beside it");
        check(with_s3(|s3| s3.bucket.clear()), "s3.bucket: is missing");
        check(
            with_s3(|s3| s3.prefix = "a/../b".to_owned()),
            "s3.prefix: `a/../b` must be",
        );
        check(
            with_s3(|s3| s3.prefix = "/a".to_owned()),
            "s3.prefix: `/a` must be",
        );
        check(
            with_s3(|s3| s3.endpoint = "http://minio:9000".to_owned()),
            "`allow_http: true`",
        );
        check(
            with_s3(|s3| s3.endpoint = "minio:9000".to_owned()),
            "is no URL",
        );
    }

    #[test]
    fn http_may_be_allowed() {
        let open = with_s3(|s3| {
            s3.endpoint = "http://minio:9000".to_owned();
            s3.allow_http = true;
            s3.prefix = "router/prod".to_owned();
        });
        assert_eq!(problems(&open), [""; 0]);
    }
}
