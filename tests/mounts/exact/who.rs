//! Users of calls: the thread changes to a user, and back to root.

use crate::exact::sys;

pub const OWNER_UID: u32 = 1001;
pub const OWNER_GID: u32 = 2001;
/// A user in the group of the files who does not own them.
pub const MEMBER_UID: u32 = 1002;
pub const OTHER_UID: u32 = 1003;
/// A group that the owner is not in.
pub const FOREIGN_GID: u32 = 2002;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum TestUser {
    Root,
    Owner,
    Member,
    Other,
    /// Another user with `CAP_FOWNER`, the privileges of owners.
    Fowner,
}

impl TestUser {
    pub const ALL: [Self; 5] = [Self::Root, Self::Owner, Self::Member, Self::Other, Self::Fowner];

    /// Runs `deed` as this user.
    pub fn run_as_user<T>(self, deed: impl FnOnce() -> T) -> T {
        const CAP_FOWNER: u64 = 1 << 3;
        match self {
            Self::Root => return deed(),
            Self::Owner => sys::become_user(OWNER_UID, OWNER_GID, &[OWNER_GID], 0),
            Self::Member => sys::become_user(MEMBER_UID, 2005, &[OWNER_GID, 2005], 0),
            Self::Other => sys::become_user(OTHER_UID, 2003, &[2003], 0),
            Self::Fowner => sys::become_user(OTHER_UID, 2003, &[2003], CAP_FOWNER),
        }
        let done = deed();
        sys::become_root();
        done
    }
}
