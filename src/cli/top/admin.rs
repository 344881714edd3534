//! Reads the pages of the admin listener.

use super::figures::Sample;
use super::metrics_text::Metrics;
use super::rows::Fleet;
use crate::cli::admin_client::AdminClient;
use crate::observe;

/// What the router says of itself now.
pub(super) async fn sample(client: &AdminClient) -> Result<Sample, String> {
    let page = async |path: &str| client.get(path).await;
    let (fleet, metrics) = (page("/fleet").await?, page("/metrics").await?);
    let fleet: Fleet = serde_json::from_slice(&fleet)
        .map_err(|error| format!("{}/fleet: is no page of a router: {error}", client.base))?;
    Ok(Sample {
        at: observe::now(),
        fleet,
        metrics: Metrics::parse(&String::from_utf8_lossy(&metrics)),
    })
}
