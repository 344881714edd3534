//! What happens to a request whose model no listed worker serves: it waits for one, or is refused.

use bytes::Bytes;

use crate::ids::Model;
use crate::relay::account::explanation::{Explanation, QueueExplained};
use crate::relay::core::Relay;
use crate::relay::job::Error;
use crate::relay::wait::Standing;
use crate::units::format_duration;

/// What a request waits for.
pub(super) const WORKER: &str = "worker";
pub(super) const ROOM: &str = "room";

impl Relay {
    /// `error` is why there is no decision. It is the answer for a model that the configuration does not name.
    pub(super) fn explain_missing(
        &self,
        model: Option<&str>,
        body: &Bytes,
        standing: Option<Standing>,
        error: Error,
    ) -> Result<Explanation, Error> {
        let is_missing = matches!(error, Error::NoWorker { .. } | Error::UnknownModel { .. });
        let Some(name) = model.filter(|name| is_missing && self.queues().is_known(name)) else {
            return Err(error);
        };
        let name = Model::from(name);
        let model = self.models.of(&name);
        let standing = self.queue.as_ref().zip(standing);
        let queue = standing.map(|(settings, standing)| {
            let class = settings.class_of(standing.priority);
            let queue = self.queues().get(&name);
            QueueExplained {
                would_wait: !settings.no_worker_timeout.is_zero(),
                waits_for: Some(WORKER),
                max_wait_ms: settings.no_worker_timeout.as_millis(),
                priority: standing.priority,
                class: settings.classes[class].name.clone(),
                waiting: queue.map_or(0, |queue| queue.waiting()),
                max_worker_queued_tokens: settings.max_worker_queued_tokens,
            }
        });
        let explanation = match &queue {
            Some(queue) if queue.would_wait => {
                let limit = self.queue.as_ref().map(|settings| settings.no_worker_timeout);
                format!(
                    "no worker serves the model yet: the request would wait for one for up to {} \
                     (queue.no_worker_timeout), and then be refused with 503 no_healthy_worker",
                    format_duration(limit.unwrap_or_default()),
                )
            }
            Some(_) => "no worker serves the model yet: the request would be refused at once with 503 no_healthy_worker \
                        (queue.no_worker_timeout is 0s)"
                .to_owned(),
            None => format!(
                "no worker serves the model yet: the request would be refused at once ({error}); with `queue.no_worker_timeout` it \
                 would wait for one"
            ),
        };
        Ok(Explanation {
            model: name.to_string(),
            policy: model.routing.policy,
            // From the body's length: only a worker's model has a tokenizer.
            prompt_tokens: (body.len() as f64 / model.bytes_per_token) as u32,
            explanation: Some(explanation),
            queue,
            ..Explanation::default()
        })
    }
}
