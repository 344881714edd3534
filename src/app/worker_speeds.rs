//! Has the workers' speeds learnt: of prompts and of answers.

use std::sync::Arc;
use std::time::Duration;

use crate::fleet::decode_time;
use crate::fleet::prefill_rate::PrefillRates;
use crate::fleet::registry::Registry;

/// What was seen of a worker within it is one observation.
const INTERVAL: Duration = Duration::from_secs(1);

pub(super) async fn learn(fleet: Arc<Registry>) {
    let mut rates = PrefillRates::default();
    loop {
        let learns = fleet.settings().learn_prefill_rates;
        rates.update(&fleet.snapshot(), learns);
        decode_time::update(&fleet.snapshot());
        tokio::time::sleep(INTERVAL).await;
    }
}
