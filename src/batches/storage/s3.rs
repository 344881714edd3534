//! S3, through the router's own HTTP client: `object_store` signs and retries, and brings no client or TLS of its own.

mod connector;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::path::Path;
use object_store::prefix::PrefixStore;
use object_store::{BackoffConfig, ObjectStore, RetryConfig};

use self::connector::S3Connector;
use crate::batches::settings::S3Settings;
use crate::http::tls;

/// Whoever waits for storage is a client or a batch. Both can try again.
const MAX_RETRIES: usize = 5;
const RETRY_TIMEOUT: Duration = Duration::from_secs(60);
const MAX_BACKOFF: Duration = Duration::from_secs(5);

/// Connects at the first operation. What the settings do not say is that of the environment, which has the credentials.
pub(super) fn open(
    settings: &S3Settings,
    clients: &tls::Clients,
) -> io::Result<Arc<dyn ObjectStore>> {
    open_with(AmazonS3Builder::from_env(), settings, clients)
}

/// As [`open`], with `defaults` in the place of the environment.
pub(super) fn open_with(
    defaults: AmazonS3Builder,
    settings: &S3Settings,
    clients: &tls::Clients,
) -> io::Result<Arc<dyn ObjectStore>> {
    let tls = clients.get(&settings.tls.clone().unwrap_or_default());
    let retry = RetryConfig {
        backoff: BackoffConfig {
            max_backoff: MAX_BACKOFF,
            ..BackoffConfig::default()
        },
        max_retries: MAX_RETRIES,
        retry_timeout: RETRY_TIMEOUT,
    };
    let mut builder = defaults
        .with_bucket_name(&settings.bucket)
        .with_retry(retry)
        .with_http_connector(S3Connector::new(tls));
    if !settings.region.is_empty() {
        builder = builder.with_region(&settings.region);
    }
    if !settings.endpoint.is_empty() {
        builder = builder.with_config(AmazonS3ConfigKey::S3Endpoint, &settings.endpoint);
    }
    if settings.allow_http {
        builder = builder.with_allow_http(true);
    }
    let failed = |error: &dyn std::fmt::Display| io::Error::other(format!("batches.s3: {error}"));
    let store = builder.build().map_err(|error| failed(&error))?;
    if settings.prefix.is_empty() {
        return Ok(Arc::new(store));
    }
    let prefix = Path::parse(&settings.prefix).map_err(|error| failed(&error))?;
    Ok(Arc::new(PrefixStore::new(store, prefix)))
}
