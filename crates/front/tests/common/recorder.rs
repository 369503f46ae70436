//! A request log with scripted requests of a server that died.

use std::sync::Mutex;

use draconis_exchange::contract::request_log::{
    DeferredRequest, LoggedRequest, RequestData, RequestLog, RequestOutcome,
};
use draconis_exchange::heap::PoolBuffer;
use draconis_types::Node;

#[derive(Default)]
pub struct ScriptedLog {
    pub inherited: Mutex<Vec<LoggedRequest>>,
    /// Reported contradictions between the log and the tree.
    pub contradictions: Mutex<Vec<String>>,
    /// Outcomes of changes, in order.
    pub decided: Mutex<Vec<RequestOutcome>>,
    /// Number of finished requests, and of finished deferred ones.
    pub done: Mutex<(u64, u64)>,
}

impl ScriptedLog {
    pub fn with_requests(requests: Vec<(Vec<u8>, Option<RequestOutcome>)>) -> Self {
        let inherited =
            requests.into_iter().zip(0..).map(|((request, outcome), at)| LoggedRequest {
                position: at,
                unique: u64::from_ne_bytes(*request[8..].first_chunk().unwrap()),
                request,
                created: None,
                outcome,
                is_accepted: false,
                answered: false,
            });
        Self { inherited: Mutex::new(inherited.collect()), ..Self::default() }
    }
}

impl RequestLog for ScriptedLog {
    fn allocate_buffer(&self, _: usize) -> Option<PoolBuffer> {
        None
    }

    fn begin_request(&self, _: u64, _: Option<(&[u8], RequestData<'_>)>) {}

    fn record_outcome(&self, outcome: RequestOutcome) {
        self.decided.lock().unwrap().push(outcome);
    }

    fn finish_request(&self) {
        self.done.lock().unwrap().0 += 1;
    }

    fn defer_completion(&self) -> Option<DeferredRequest> {
        Some(DeferredRequest(7))
    }

    fn finish_deferred(&self, deferred: DeferredRequest) {
        assert_eq!(deferred.0, 7);
        self.done.lock().unwrap().1 += 1;
    }

    fn is_quarantined(&self, _: u64) -> bool {
        false
    }

    fn report_quarantined(&self, what: String) {
        panic!("{what}");
    }

    fn unfinished_requests(&self) -> Result<Option<Vec<LoggedRequest>>, String> {
        Ok(Some(std::mem::take(&mut *self.inherited.lock().unwrap())))
    }

    fn replay(&self, _: &LoggedRequest, work: &mut dyn FnMut()) {
        work();
    }

    fn fail_replay(&self, why: &str) {
        self.contradictions.lock().unwrap().push(why.to_owned());
    }

    fn end_replay(&self) {}

    fn finish_replay(&self) {}

    fn orphans(&self) -> Vec<Node> {
        vec![]
    }

    fn is_orphan(&self, _: Node) -> bool {
        false
    }

    fn release_orphans(&self, _: &[Node]) {}

    fn release_orphan(&self, _: Node) {}
}
