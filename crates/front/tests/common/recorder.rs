//! A recorder that hands over changes of a server that died, as a test says.

use std::sync::Mutex;

use draconis_exchange::contract::Node;
use draconis_exchange::contract::recorder::{Contents, Deferred, Inherited, Outcome, Recorder};
use draconis_exchange::heap::Room;

#[derive(Default)]
pub struct Heir {
    pub inherited: Mutex<Vec<Inherited>>,
    /// What did not agree with the tree.
    pub contradictions: Mutex<Vec<String>>,
    /// Outcomes of changes, in their order.
    pub decided: Mutex<Vec<Outcome>>,
    /// How many requests were done, and of those how many were deferred.
    pub done: Mutex<(u64, u64)>,
}

impl Heir {
    pub fn of(requests: Vec<(Vec<u8>, Option<Outcome>)>) -> Self {
        let inherited = requests.into_iter().zip(0..).map(|((request, outcome), at)| Inherited {
            at,
            unique: u64::from_ne_bytes(*request[8..].first_chunk().unwrap()),
            request,
            made: None,
            outcome,
            taken: false,
            answered: false,
        });
        Self { inherited: Mutex::new(inherited.collect()), ..Self::default() }
    }
}

impl Recorder for Heir {
    fn room(&self, _: usize) -> Option<Room> {
        None
    }

    fn begin(&self, _: u64, _: Option<(&[u8], Contents<'_>)>) {}

    fn decided(&self, outcome: Outcome) {
        self.decided.lock().unwrap().push(outcome);
    }

    fn done(&self) {
        self.done.lock().unwrap().0 += 1;
    }

    fn defer(&self) -> Option<Deferred> {
        Some(Deferred(7))
    }

    fn deferred_done(&self, deferred: Deferred) {
        assert_eq!(deferred.0, 7);
        self.done.lock().unwrap().1 += 1;
    }

    fn refuses(&self, _: u64) -> bool {
        false
    }

    fn refused(&self, what: String) {
        panic!("{what}");
    }

    fn inherited(&self) -> Result<Option<Vec<Inherited>>, String> {
        Ok(Some(std::mem::take(&mut *self.inherited.lock().unwrap())))
    }

    fn repeat(&self, _: &Inherited, work: &mut dyn FnMut()) {
        work();
    }

    fn contradicted(&self, why: &str) {
        self.contradictions.lock().unwrap().push(why.to_owned());
    }

    fn settled(&self) {}

    fn nameless(&self) -> Vec<Node> {
        vec![]
    }

    fn is_nameless(&self, _: Node) -> bool {
        false
    }

    fn release(&self, _: &[Node]) {}

    fn give_back(&self, _: Node) {}
}
