//! Table of a contract: which side may send which message in which state.
//!
//! ```text
//!          Read ▶                 ◀ AckRead | NakRead
//!   Ready ────────▶ awaiting Read ─────────────────────▶ Ready
//! ```
//!
//! Law 1: every cycle has a step of each side, so a queue has a constant bound.
//! Law 2: every reply returns the request's blocks.
//! Law 3: the table decides which messages a peer may send; types only bind the honest side.
//!
//! Everything here is `const`: a contract that breaks law 1 or 2 does not compile.

/// Side that sends a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sender {
    /// The requesting endpoint.
    Client,
    /// The answering endpoint.
    Server,
}

/// One field of a message.
#[derive(Clone, Copy, Debug)]
pub struct FieldInfo {
    /// Name in the contract.
    pub name: &'static str,
    /// Hash of its type.
    pub kind: u64,
    /// True if it holds blocks.
    pub blocks: bool,
    /// Maximum encoded length in bytes.
    pub bytes_max: usize,
}

/// One message.
#[derive(Clone, Copy, Debug)]
pub struct MessageInfo {
    /// Name in the contract.
    pub name: &'static str,
    /// Side that may send it.
    pub sender: Sender,
    /// Its fields, in order.
    pub fields: &'static [FieldInfo],
}

/// A step from state `from` to state `to` by message `tag`.
#[derive(Clone, Copy, Debug)]
pub struct Transition {
    /// State in which it may be sent: an index of [`Fsm::states`].
    pub from: u8,
    /// Message: an index of [`Fsm::messages`].
    pub tag: u8,
    /// Next state: an index of [`Fsm::states`].
    pub to: u8,
}

/// A request with its two replies, as indices of [`Fsm::messages`].
#[derive(Clone, Copy, Debug)]
pub struct CallTags {
    /// The request.
    pub request: u8,
    /// The reply to success.
    pub ack: u8,
    /// The reply to failure.
    pub nak: u8,
}

/// A contract's table.
#[derive(Clone, Copy, Debug)]
pub struct Fsm {
    /// The contract's name.
    pub name: &'static str,
    /// States of the contract, then one "awaiting" state per request.
    pub states: &'static [&'static str],
    /// All messages.
    pub messages: &'static [MessageInfo],
    /// All steps.
    pub steps: &'static [Transition],
    /// All requests that have replies.
    pub calls: &'static [CallTags],
    /// First state of a channel.
    pub start: u8,
}

impl Fsm {
    /// Returns the state after `tag` in `state`, if `sender` may send it there.
    pub const fn next_state(&self, state: u8, tag: u8, sender: Sender) -> Option<u8> {
        // The macro lists one step per message, in the messages' order: no search.
        let at = tag as usize;
        if at < self.steps.len() && self.steps[at].tag == tag && self.steps[at].from == state {
            let step = &self.steps[at];
            let right = self.sender_of(step) as u8 == sender as u8;
            return if right { Some(step.to) } else { None };
        }
        let mut i = 0;
        while i < self.steps.len() {
            let step = &self.steps[i];
            if step.from == state && step.tag == tag {
                let right = self.sender_of(step) as u8 == sender as u8;
                return if right { Some(step.to) } else { None };
            }
            i += 1;
        }
        None
    }

    /// Returns true if nothing can be sent in `state`.
    pub const fn is_final(&self, state: u8) -> bool {
        let mut i = 0;
        while i < self.steps.len() {
            if self.steps[i].from == state {
                return false;
            }
            i += 1;
        }
        true
    }

    const fn sender_of(&self, step: &Transition) -> Sender {
        self.messages[step.tag as usize].sender
    }

    /// Returns the maximum number of waiting messages in one direction: the longest run of one
    /// side.
    ///
    /// # Panics
    /// Panics if one side can send without limit. Evaluated at compile time, so such a contract
    /// does not compile.
    pub const fn queue_bound(&self) -> usize {
        let client = self.longest_sender_run(Sender::Client);
        let server = self.longest_sender_run(Sender::Server);
        if client > server { client } else { server }
    }

    /// Longest path over the steps of one sender. Each state is relaxed once; a path that can still
    /// grow is a cycle of that sender's steps alone.
    const fn longest_sender_run(&self, sender: Sender) -> usize {
        assert!(self.states.len() <= MAX_STATES, "a contract has too many states");
        let mut run = [0usize; MAX_STATES];
        let mut round = 0;
        while round <= self.states.len() {
            let mut grown = false;
            let mut i = 0;
            while i < self.steps.len() {
                let step = &self.steps[i];
                let (from, to) = (step.from as usize, step.to as usize);
                if self.sender_of(step) as u8 == sender as u8 && run[to] < run[from] + 1 {
                    run[to] = run[from] + 1;
                    grown = true;
                }
                i += 1;
            }
            if !grown {
                return max_element(&run);
            }
            round += 1;
        }
        panic!("a cycle of this contract lacks a send or a receive: its queue has no bound")
    }

    /// Checks law 2, and that every message fits a mailbox of `line_bytes`.
    ///
    /// # Panics
    /// Panics otherwise; at compile time, as [`Fsm::queue_bound`].
    pub const fn check(&self, line_bytes: usize) {
        let mut i = 0;
        while i < self.calls.len() {
            let family = &self.calls[i];
            let request = self.messages[family.request as usize].fields;
            let ack = self.messages[family.ack as usize].fields;
            let nak = self.messages[family.nak as usize].fields;
            let mut f = 0;
            while f < request.len() {
                let field = &request[f];
                if field.blocks {
                    assert!(
                        contains_field(ack, field) && contains_field(nak, field),
                        "a block of a request is lost: both replies must return it"
                    );
                }
                f += 1;
            }
            i += 1;
        }
        let mut m = 0;
        while m < self.messages.len() {
            assert!(
                max_packed_bytes(self.messages[m].fields) <= line_bytes,
                "a message exceeds a line"
            );
            m += 1;
        }
    }

    /// Returns a hash of all names, types and steps. Endpoints with different hashes must not talk.
    pub const fn fingerprint(&self) -> u64 {
        let mut hash = hash_str(FNV_OFFSET_BASIS, self.name);
        let mut i = 0;
        while i < self.states.len() {
            hash = hash_str(hash, self.states[i]);
            i += 1;
        }
        i = 0;
        while i < self.messages.len() {
            let message = &self.messages[i];
            hash = hash_u64(hash_str(hash, message.name), message.sender as u64);
            let mut f = 0;
            while f < message.fields.len() {
                hash = hash_u64(hash_str(hash, message.fields[f].name), message.fields[f].kind);
                f += 1;
            }
            i += 1;
        }
        i = 0;
        while i < self.steps.len() {
            let step = &self.steps[i];
            hash =
                hash_u64(hash, (step.from as u64) << 16 | (step.tag as u64) << 8 | step.to as u64);
            i += 1;
        }
        hash
    }
}

const MAX_STATES: usize = 256;

const fn max_element(of: &[usize]) -> usize {
    let (mut most, mut i) = (0, 0);
    while i < of.len() {
        if of[i] > most {
            most = of[i];
        }
        i += 1;
    }
    most
}

const fn contains_field(fields: &[FieldInfo], wanted: &FieldInfo) -> bool {
    let mut i = 0;
    while i < fields.len() {
        if fields[i].kind == wanted.kind && str_eq(fields[i].name, wanted.name) {
            return true;
        }
        i += 1;
    }
    false
}

const fn str_eq(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    if a.len() != b.len() {
        return false;
    }
    let mut i = 0;
    while i < a.len() {
        if a[i] != b[i] {
            return false;
        }
        i += 1;
    }
    true
}

const fn max_packed_bytes(fields: &[FieldInfo]) -> usize {
    let (mut sum, mut i) = (0, 0);
    while i < fields.len() {
        sum += fields[i].bytes_max;
        i += 1;
    }
    sum
}

/// FNV-1a, 64 bits: a check against mistakes, not against malice.
const FNV_OFFSET_BASIS: u64 = 0xcbf2_9ce4_8422_2325;

const fn hash_byte(hash: u64, byte: u8) -> u64 {
    (hash ^ byte as u64).wrapping_mul(0x0000_0100_0000_01b3)
}

const fn hash_str(mut hash: u64, s: &str) -> u64 {
    let bytes = s.as_bytes();
    let mut i = 0;
    while i < bytes.len() {
        hash = hash_byte(hash, bytes[i]);
        i += 1;
    }
    // A byte that no name holds keeps ("ab", "c") and ("a", "bc") apart.
    hash_byte(hash, 0)
}

const fn hash_u64(mut hash: u64, n: u64) -> u64 {
    let bytes = n.to_le_bytes();
    let mut i = 0;
    while i < 8 {
        hash = hash_byte(hash, bytes[i]);
        i += 1;
    }
    hash
}

/// Returns the hash of a field's type: its name, and the hashes of its parts.
pub const fn type_hash(name: &str, parts: &[u64]) -> u64 {
    let mut hash = hash_str(FNV_OFFSET_BASIS, name);
    let mut i = 0;
    while i < parts.len() {
        hash = hash_u64(hash, parts[i]);
        i += 1;
    }
    hash
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLIENT_MESSAGE: MessageInfo =
        MessageInfo { name: "Ask", sender: Sender::Client, fields: &[] };
    const SERVER_MESSAGE: MessageInfo =
        MessageInfo { name: "Tell", sender: Sender::Server, fields: &[] };

    fn fsm(steps: &'static [Transition]) -> Fsm {
        Fsm {
            name: "Test",
            states: &["A", "B", "C"],
            messages: &[CLIENT_MESSAGE, SERVER_MESSAGE],
            steps,
            calls: &[],
            start: 0,
        }
    }

    #[test]
    fn queue_bound_is_longest_run_of_one_sender() {
        let ping_pong =
            fsm(&[Transition { from: 0, tag: 0, to: 1 }, Transition { from: 1, tag: 1, to: 0 }]);
        assert_eq!(ping_pong.queue_bound(), 1);
        let two_asks = fsm(&[
            Transition { from: 0, tag: 0, to: 1 },
            Transition { from: 1, tag: 0, to: 2 },
            Transition { from: 2, tag: 1, to: 0 },
        ]);
        assert_eq!(two_asks.queue_bound(), 2);
    }

    #[test]
    #[should_panic(expected = "no bound")]
    fn one_sender_cycle_has_no_queue_bound() {
        fsm(&[Transition { from: 0, tag: 0, to: 1 }, Transition { from: 1, tag: 0, to: 0 }])
            .queue_bound();
    }

    #[test]
    fn next_state_covers_all_states_messages_senders() {
        let table =
            fsm(&[Transition { from: 0, tag: 0, to: 1 }, Transition { from: 1, tag: 1, to: 2 }]);
        for state in 0..4 {
            for tag in 0..4 {
                for sender in [Sender::Client, Sender::Server] {
                    let expected = match (state, tag, sender) {
                        (0, 0, Sender::Client) => Some(1),
                        (1, 1, Sender::Server) => Some(2),
                        _ => None,
                    };
                    assert_eq!(table.next_state(state, tag, sender), expected);
                }
            }
        }
        assert!(table.is_final(2) && !table.is_final(0) && !table.is_final(1));
    }

    #[test]
    fn fingerprint_depends_on_names_and_transitions() {
        let a = fsm(&[Transition { from: 0, tag: 0, to: 1 }]);
        let b = fsm(&[Transition { from: 0, tag: 0, to: 2 }]);
        let c = Fsm { name: "Other", ..a };
        assert_ne!(a.fingerprint(), b.fingerprint());
        assert_ne!(a.fingerprint(), c.fingerprint());
        assert_eq!(a.fingerprint(), fsm(&[Transition { from: 0, tag: 0, to: 1 }]).fingerprint());
    }
}
