//! Violations of a contract by a peer, as detected by heap, lanes and contracts.

/// A violation of the contract by a peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Violation {
    /// No message has this tag.
    #[error("tag {0} names no message")]
    Tag(u32),
    /// The message may not be sent now.
    #[error("{message} may not be sent in state {state}")]
    State {
        /// Name of the message.
        message: &'static str,
        /// State in which it was sent.
        state: &'static str,
    },
    /// The message is longer or shorter than its fields.
    #[error("a message of {0} bytes has the wrong length")]
    Length(u32),
    /// A field holds a value that its type does not allow.
    #[error("a field of type {0} holds an impossible value")]
    Value(&'static str),
    /// No slot of the arena has this number.
    #[error("slot {0} does not exist")]
    Slot(u32),
    /// The peer names a slot that it does not own.
    #[error("slot {0} is not the sender's to give")]
    Owner(u32),
    /// The slot was exported with another generation.
    #[error("slot {0} has another generation")]
    Generation(u32),
    /// A block is longer than its slot, or has another length than was lent.
    #[error("a block of slot {0} has a length it cannot have")]
    BlockLength(u32),
    /// A range of pool memory from this byte is empty or out of bounds.
    #[error("nothing that can be given lies at byte {0} of the memory beside")]
    PoolRange(u32),
    /// The two endpoints were built from different contracts.
    #[error("the peer speaks another contract")]
    Fingerprint,
    /// A mailbox was written before the previous message was read, or out of turn.
    #[error("a line was written out of turn")]
    Turn,
    /// The peer signalled the event fd repeatedly without a message.
    #[error("the peer rings without a message")]
    Flood,
    /// The shared memory is not sealed or has another size.
    #[error("the shared memory is not what was agreed: {0}")]
    Memory(&'static str),
    /// The session was opened with the wrong descriptors.
    #[error("the session's descriptors are not what was agreed: {0}")]
    Descriptors(&'static str),
}
