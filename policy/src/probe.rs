//! What a host can enforce, found by doing the whole set-up in a throw-away child.
use serde::{Deserialize, Serialize};

use crate::codec::{Decode, Encode};
use crate::mode::Tier;
use crate::result::Unenforced;

/// Everything the helper found out about this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Encode, Decode)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct ProbeReport {
    /// `uname -r`.
    pub kernel: String,
    /// Machine architecture.
    pub arch: String,
    /// Active security modules, when the list can be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lsm: Option<String>,
    /// Landlock ABI of the kernel; 0 when there is none.
    pub landlock_abi: u32,
    /// Seccomp filters can be installed.
    pub seccomp_filter: bool,
    /// A notification listener can be had, and its receive call is not refused.
    pub seccomp_notify: bool,
    /// Why not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seccomp_notify_reason: Option<String>,
    /// User namespaces can be made and used.
    pub user_namespaces: bool,
    /// Why not: the step and errno.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_namespaces_reason: Option<String>,
    /// Each tier, best first.
    pub tiers: Vec<TierReport>,
    /// What an operator can do about what is missing, one sentence each.
    #[serde(default)]
    pub advice: Vec<String>,
}

/// One tier on this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Encode, Decode)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct TierReport {
    /// Which.
    pub tier: Tier,
    /// The whole set-up succeeded and the forbidden things were refused.
    pub usable: bool,
    /// Why not: the step that failed and its errno.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What this tier cannot promise on this kernel.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unenforced: Vec<Unenforced>,
}

impl ProbeReport {
    /// The best usable tier, if any.
    #[must_use]
    pub fn best_tier(&self) -> Option<Tier> {
        self.tiers.iter().find(|tier| tier.usable).map(|tier| tier.tier)
    }
}
