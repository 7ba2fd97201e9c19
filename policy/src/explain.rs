//! Would this be allowed, and by which rule? The judgement of a command that is not run.
//!
//! It is the judgement by name: every git directory counts as one that was there before the command, and whether the user may do it at all is the
//! kernel's affair.
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::bytes::ByteString;
use crate::codec::{Decode, Encode};
use crate::decide::{Verdict, allowed_by, write};
use crate::denial::{Errno, Operation, Rule};
use crate::paths;
use crate::plan::Confinement;

/// What is asked about each path.
const OPERATIONS: [Operation; 6] = [
    Operation::ReadFile,
    Operation::WriteFile,
    Operation::CreateFile,
    Operation::RemoveFile,
    Operation::ChangeMode,
    Operation::ConnectUnix,
];

/// The answers about one path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Encode, Decode)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct PathAnswer {
    /// Absolute and canonical; of what is missing, the name that it would get.
    pub path: ByteString,
    /// One for each operation.
    pub operations: Vec<OperationAnswer>,
}

/// One answer. The last three are there when it would be refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Encode, Decode)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct OperationAnswer {
    /// What would be tried.
    pub operation: Operation,
    /// Whether the policy permits it.
    pub allowed: bool,
    /// The rule that says no.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<Rule>,
    /// The error that the program would get.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub errno: Option<Errno>,
    /// The narrowest change of policy that would allow it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allowed_by: Option<String>,
}

/// Judges each operation on `path`, which is relative to `workdir` unless it is absolute. Without a confinement everything is permitted.
#[must_use]
pub fn explain(
    confinement: Option<&Confinement>,
    path: &ByteString,
    workdir: &Path,
    home: Option<&Path>,
) -> PathAnswer {
    let expanded = paths::expand_home(path, home).unwrap_or_else(|| path.to_path_buf());
    let path = ByteString::from(paths::as_far_as_it_exists(&workdir.join(expanded)));
    let operations = OPERATIONS.iter().map(|operation| {
        let verdict = confinement.map_or(Verdict::Allow, |confinement| {
            write(confinement, *operation, path.as_bytes())
        });
        match (verdict, confinement) {
            (Verdict::Refuse(rule), Some(confinement)) => OperationAnswer {
                operation: *operation,
                allowed: false,
                rule: Some(rule),
                errno: Some(operation.errno()),
                allowed_by: allowed_by(confinement, *operation, rule, Some(path.as_bytes())),
            },
            _ => OperationAnswer {
                operation: *operation,
                allowed: true,
                rule: None,
                errno: None,
                allowed_by: None,
            },
        }
    });
    let operations = operations.collect();
    PathAnswer { path, operations }
}
