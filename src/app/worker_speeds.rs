//! Has the workers' speeds learnt.

use std::sync::Arc;
use std::time::Duration;

use crate::fleet::registry::Registry;
use crate::fleet::speed::Speeds;

/// What was seen of a worker within it is one observation of prompts and one of answers.
const INTERVAL: Duration = Duration::from_secs(1);

pub(super) async fn learn(fleet: Arc<Registry>) {
    let mut speeds = Speeds::default();
    loop {
        speeds.update(&fleet.snapshot());
        tokio::time::sleep(INTERVAL).await;
    }
}
