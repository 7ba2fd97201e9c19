//! The Landlock ruleset of a plan: what may be written, which devices may be used, what of the network and of other processes is out of reach.
use std::os::fd::OwnedFd;

use dsh_policy::bytes::ByteString;
use dsh_policy::mode::{Guarantee, Network};
use dsh_policy::plan::Confinement;
use dsh_policy::result::Unenforced;
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, Ruleset, RulesetAttr,
    RulesetCreated, RulesetCreatedAttr, RulesetError, Scope,
};
use rustix::fs::{FileType, OFlags, ResolveFlags};

use crate::sys;
use crate::world::World;

/// Records of refusals appear in the kernel's audit log also after exec: what the supervisor let through and Landlock refused was a race.
const LOG_NEW_EXEC_ON: u32 = 1 << 1;

/// Why no ruleset could be made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LandlockError {
    /// The kernel has no Landlock, or it is not switched on.
    #[error("this kernel has no Landlock, or it is not in the list of security modules (boot with lsm=landlock,…)")]
    Missing,
    /// A writable root or device of the plan cannot be opened.
    #[error("{0:?}: {1}")]
    Root(ByteString, rustix::io::Errno),
    /// The kernel refused the ruleset.
    #[error("{0}")]
    Ruleset(#[from] RulesetError),
}

impl LandlockError {
    /// The kernel's error, when there is one.
    pub(crate) fn errno(&self) -> i32 {
        match self {
            Self::Root(_, errno) => errno.raw_os_error(),
            Self::Missing => libc::EOPNOTSUPP,
            Self::Ruleset(_) => std::io::Error::last_os_error().raw_os_error().unwrap_or(0),
        }
    }
}

/// A ruleset, ready to be enforced.
pub(crate) struct Prepared {
    /// The ruleset.
    pub(crate) ruleset: OwnedFd,
    /// Flags to enforce it with.
    pub(crate) restrict_flags: u32,
    /// ABI of the kernel.
    pub(crate) abi: u32,
}

/// Everything that this product handles of Landlock, up to ABI 10. Reading and executing are not restricted here. `ResolveUnix` (ABI 9) is left out: Unix
/// sockets by path are mediated by the supervisor, which can tell a socket of the command from one of the host.
fn handled() -> BitFlags<AccessFs> {
    AccessFs::from_write(ABI::V8)
}

/// Makes the ruleset of a plan, for the objects that its paths lead to where the command runs.
pub(crate) fn prepare(confinement: &Confinement, world: &World) -> Result<Prepared, LandlockError> {
    let abi = sys::landlock_abi();
    if abi == 0 {
        return Err(LandlockError::Missing);
    }
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(handled())?;
    if confinement.network == Network::None {
        ruleset = ruleset.handle_access(AccessNet::from_all(ABI::V8))?;
    }
    let mut created = ruleset.scope(Scope::from_all(ABI::V8))?.create()?;
    for root in &confinement.writable {
        created = allow(created, world, root, handled())?;
    }
    for device in &confinement.devices {
        created = allow(
            created,
            world,
            device,
            AccessFs::WriteFile | AccessFs::Truncate | AccessFs::IoctlDev,
        )?;
    }
    let ruleset = Option::<OwnedFd>::from(created).ok_or(LandlockError::Missing)?;
    Ok(Prepared {
        ruleset,
        restrict_flags: if abi >= 7 { LOG_NEW_EXEC_ON } else { 0 },
        abi,
    })
}

/// Adds one root. A file gets only the rights that files have. A device that this host lacks needs no rule.
fn allow(
    ruleset: RulesetCreated,
    world: &World,
    path: &ByteString,
    access: BitFlags<AccessFs>,
) -> Result<RulesetCreated, LandlockError> {
    let root = match world.open(path.as_bytes(), OFlags::PATH | OFlags::CLOEXEC, ResolveFlags::empty()) {
        Ok(root) => root,
        Err(rustix::io::Errno::NOENT) if path.as_bytes().starts_with(b"/dev/") => return Ok(ruleset),
        Err(errno) => return Err(LandlockError::Root(path.clone(), errno)),
    };
    let stat = rustix::fs::fstat(&root).map_err(|errno| LandlockError::Root(path.clone(), errno))?;
    let is_folder = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
    let access = if is_folder {
        access
    } else {
        access & AccessFs::from_file(ABI::V8)
    };
    Ok(ruleset.add_rule(PathBeneath::new(root, access))?)
}

/// The guarantees that a kernel of this ABI cannot give.
pub(crate) fn unenforced(abi: u32, confinement: &Confinement) -> Vec<Unenforced> {
    let mut missing = Vec::new();
    let mut lacks = |minimum: u32, guarantee: Guarantee, what: &str| {
        if abi < minimum {
            let reason = format!("{what} needs Landlock ABI {minimum}; this kernel has {abi}");
            missing.push(Unenforced { guarantee, reason });
        }
    };
    lacks(3, Guarantee::FileWrites, "refusing truncation");
    lacks(5, Guarantee::DeviceIoctl, "refusing device commands");
    lacks(6, Guarantee::Processes, "refusing signals to processes outside");
    lacks(6, Guarantee::AbstractSockets, "refusing abstract sockets of the host");
    if confinement.network == Network::None {
        lacks(4, Guarantee::Network, "refusing TCP underneath the socket rules");
    }
    missing
}
