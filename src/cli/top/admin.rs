//! Reads the pages of the admin listener.

use super::figures::Sample;
use crate::cli::admin_client::AdminClient;
use crate::observe;

/// What the router says of itself now.
pub(super) async fn sample(client: &AdminClient) -> Result<Sample, String> {
    let (fleet, metrics) = (client.read("/fleet").await?, client.get("/metrics").await?);
    let metrics = String::from_utf8_lossy(&metrics);
    Ok(Sample::new(observe::now(), fleet, &metrics))
}
