//! Reads where the Kubernetes API is, and what to say who asks.

use std::time::Duration;

use kube::client::ClientBuilder;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use tower::layer::layer_fn;

use super::failure::Failure;
use super::metrics::EntryMetrics;
use super::pace::Paced;
use super::settings::{Advanced, Settings};

/// A connection within a cluster takes milliseconds.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// How the API is asked, the same for all that one entry follows.
#[derive(Clone)]
pub(super) struct ApiContext {
    pub(super) client: Client,
    pub(super) namespace: String,
    pub(super) settings: Advanced,
    pub(super) metrics: EntryMetrics,
}

/// Reads everything anew, tokens and certificates too.
pub(super) async fn connect(
    settings: &Settings,
    metrics: &EntryMetrics,
) -> Result<ApiContext, Failure> {
    let mut config = config(settings).await?;
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    // Retries are paused, counted and logged here.
    config.default_retry = false;
    let namespace = match &*settings.namespace {
        "" => config.default_namespace.clone(),
        namespace => namespace.to_owned(),
    };
    let client = ClientBuilder::try_from(config).map_err(|error| Failure::connect(&error))?;
    let paced = layer_fn(|inner| Paced::new(inner, metrics.clone()));
    Ok(ApiContext {
        client: client.with_layer(&paced).build(),
        namespace,
        settings: settings.advanced.clone(),
        metrics: metrics.clone(),
    })
}

async fn config(settings: &Settings) -> Result<Config, Failure> {
    let is_in_cluster = std::env::var_os("KUBERNETES_SERVICE_HOST").is_some();
    if settings.kubeconfig.is_empty() && settings.context.is_empty() && is_in_cluster {
        return Config::incluster().map_err(|error| Failure::connect(&error));
    }
    let options = KubeConfigOptions {
        context: Some(settings.context.clone()).filter(|context| !context.is_empty()),
        ..KubeConfigOptions::default()
    };
    let config = if settings.kubeconfig.is_empty() {
        Config::from_kubeconfig(&options).await
    } else {
        match Kubeconfig::read_from(&settings.kubeconfig) {
            Ok(kubeconfig) => Config::from_custom_kubeconfig(kubeconfig, &options).await,
            Err(error) => Err(error),
        }
    };
    config.map_err(|error| Failure::connect(&error))
}
