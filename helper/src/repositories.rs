//! Which git directories were there before the command: those are protected, the ones that it makes itself are its own.
use std::cell::RefCell;
use std::collections::HashSet;
use std::rc::Rc;

use dsh_policy::git::{Candidate, RepositoryView};
use rustix::fs::StatxFlags;
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};

use crate::object::join;
use crate::world::World;

/// Most names that are remembered as missing; beyond that, what is made within the first clock tick counts as old.
const MAX_MISSING: usize = 4096;

/// Tells old from new by the birth time of the object, which renaming a folder above it does not change.
#[derive(Debug)]
pub(crate) struct Repositories {
    world: Rc<World>,
    started: (i64, u32),
    /// Names at which nothing was during this command. Needed only for what is made within the clock tick in which the command started.
    missing: RefCell<HashSet<Vec<u8>>>,
}

impl Repositories {
    /// Everything that is there now is old.
    pub(crate) fn new(world: Rc<World>) -> Self {
        // The clock that file systems stamp with, so that the comparison is exact.
        let now = clock_gettime(ClockId::RealtimeCoarse);
        Self {
            world,
            started: (now.tv_sec, u32::try_from(now.tv_nsec).unwrap_or(0)),
            missing: RefCell::new(HashSet::new()),
        }
    }
}

impl Repositories {
    /// Any of what a git directory is made of, so that moving one part away first does not free the rest.
    fn holds_any_part(&self, folder: &[u8]) -> bool {
        [&b"HEAD"[..], b"objects", b"refs"]
            .iter()
            .any(|name| self.has(folder, name))
    }

    /// `HEAD` with `objects` and `refs`, or with `commondir`.
    fn looks_like_git(&self, folder: &[u8]) -> bool {
        let has = |name: &[u8]| self.has(folder, name);
        has(b"HEAD") && ((has(b"objects") && has(b"refs")) || has(b"commondir"))
    }

    fn has(&self, folder: &[u8], name: &[u8]) -> bool {
        self.world.has(&join(folder, name))
    }
}

impl RepositoryView for Repositories {
    fn predates(&self, candidate: &Candidate<'_>) -> bool {
        let found = match self.world.stat(candidate.git_dir, StatxFlags::BTIME) {
            Ok(found) => found,
            Err(Errno::NOENT) => {
                let mut missing = self.missing.borrow_mut();
                if candidate.named && missing.len() < MAX_MISSING {
                    missing.insert(candidate.git_dir.to_vec());
                }
                return false;
            }
            Err(_) => return candidate.named,
        };
        let is_git = if is_called_bare(candidate.git_dir) {
            self.holds_any_part(candidate.git_dir)
        } else {
            candidate.named || self.looks_like_git(candidate.git_dir)
        };
        if !is_git {
            return false;
        }
        if found.stx_mask & StatxFlags::BTIME.bits() == 0 {
            return true; // This file system keeps no birth time: in doubt, old.
        }
        let born = (found.stx_btime.tv_sec, found.stx_btime.tv_nsec);
        born < self.started || (born == self.started && !self.missing.borrow().contains(candidate.git_dir))
    }
}

/// `x.git`: most likely a bare repository, but a folder of notes may be called so too.
fn is_called_bare(folder: &[u8]) -> bool {
    folder.strip_suffix(b".git").is_some_and(|stem| !stem.ends_with(b"/"))
}
