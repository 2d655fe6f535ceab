//! Opening UCX: the library, its settings, what it may use here.

use std::{
    env,
    ffi::{CStr, CString, c_char},
    ptr,
    sync::OnceLock,
};

use antiphon_device::library::Library;

use super::{
    super::EngineError,
    ffi::{self, Config, Context, Functions, OK, Status},
};

/// The oldest version that the engine was tried with.
const OLDEST: (u32, u32) = (1, 13);
/// The version that [`ffi`] declares.
const DECLARED: (u32, u32) = (1, 22);

/// Settings that the engine prefers. A variable `UCX_…` of the user goes before them.
const SETTINGS: [(&str, &str); 1] = [
    // How often shared memory and InfiniBand look whether a silent peer lives. UCX's own choice is 20 s.
    ("KEEPALIVE_INTERVAL", "1s"),
];

/// Transports within one machine.
const WITHIN: [&str; 9] =
    ["self", "posix", "sysv", "cma", "knem", "xpmem", "cuda_copy", "cuda_ipc", "gdr_copy"];

/// UCX as it is installed, and what it can use on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Survey {
    /// Its version.
    pub version: String,
    /// The file, or the name that the dynamic loader found it by.
    pub library: String,
    /// The transports with their devices, such as `tcp` with `eth0`, as the user's variables allow them.
    pub devices: Vec<(String, String)>,
}

impl Survey {
    /// Whether a transport goes to other machines. Those within a machine cannot tell that a peer failed, and UCX refuses to use them for a
    /// connection that wants to know.
    pub(super) fn leaves_the_machine(&self) -> bool {
        self.between_machines().next().is_some()
    }

    /// The transports that go to other machines, with their devices.
    pub fn between_machines(&self) -> impl Iterator<Item = &(String, String)> {
        self.devices.iter().filter(|(transport, _)| !WITHIN.contains(&transport.as_str()))
    }

    /// The devices on one line, by transport.
    pub(super) fn devices_on_a_line(&self) -> String {
        let names: Vec<String> =
            self.devices.iter().map(|(transport, device)| format!("{transport}/{device}")).collect();
        if names.is_empty() { "none".to_owned() } else { names.join(", ") }
    }
}

/// The library, opened once.
pub(super) struct Api {
    pub(super) functions: Functions,
    pub(super) version: (u32, u32),
    /// Three numbers with dots.
    pub(super) version_text: String,
}

impl Api {
    /// Opens UCX the first time, looking where [`antiphon_device::library`] says; the same answer ever after.
    pub(super) fn load() -> Result<&'static Self, EngineError> {
        static API: OnceLock<Result<Api, EngineError>> = OnceLock::new();
        API.get_or_init(Self::open).as_ref().map_err(Clone::clone)
    }

    fn open() -> Result<Self, EngineError> {
        let functions = Functions::of(Library::open(&ffi::UCX)?)?;
        let (mut major, mut minor, mut release) = (0, 0, 0);
        // SAFETY: writes three numbers.
        unsafe { (functions.get_version)(&mut major, &mut minor, &mut release) };
        let version = (major, minor);
        if version < OLDEST {
            return Err(EngineError::TooOld {
                library: functions.library.path().display().to_string(),
                found: version,
                needed: OLDEST,
                install: ffi::UCX.install,
            });
        }
        Ok(Self { functions, version, version_text: format!("{major}.{minor}.{release}") })
    }

    /// The error of a function that returned `status`, if it did not succeed.
    pub(super) fn check(&self, function: &'static str, status: Status) -> Result<(), EngineError> {
        if status == OK {
            return Ok(());
        }
        // SAFETY: returns a constant of the library, which is never closed, or a buffer of this thread, for every number.
        let text = unsafe { CStr::from_ptr((self.functions.status_string)(status)) };
        Err(EngineError::Call { function, code: status.into(), text: text.to_string_lossy().into_owned() })
    }

    /// Makes a context for active messages between `peers` peers. `settings` are names without `UCX_` with their values.
    pub(super) fn context(&self, peers: usize, settings: &[(&str, &str)]) -> Result<Context, EngineError> {
        let functions = &self.functions;
        let mut config: Config = ptr::null_mut();
        // SAFETY: null names no prefix and no file; writes one pointer.
        self.check("ucp_config_read", unsafe {
            (functions.config_read)(ptr::null(), ptr::null(), &mut config)
        })?;
        let made = self.set(config, settings).and_then(|()| {
            let params = ffi::Params::new(ffi::FEATURE_AM | ffi::FEATURE_WAKEUP, peers);
            // A library that is older than what it is asked for warns.
            let (major, minor) = self.version.min(DECLARED);
            let mut context: Context = ptr::null_mut();
            // SAFETY: both structures live during the call; writes one pointer.
            let status = unsafe { (functions.init_version)(major, minor, &params, config, &mut context) };
            self.check("ucp_init_version", status).map(|()| context)
        });
        // SAFETY: the configuration was read above, and contexts copy it.
        unsafe { (functions.config_release)(config) };
        made
    }

    fn set(&self, config: Config, settings: &[(&str, &str)]) -> Result<(), EngineError> {
        let free = |(name, _): &&(&str, &str)| env::var_os(format!("UCX_{name}")).is_none();
        for (name, value) in SETTINGS.iter().chain(settings).filter(free) {
            let [name, value] = [name, value].map(|text| CString::new(*text).expect("settings have no NUL"));
            // SAFETY: the configuration is open, and copies the texts.
            let status = unsafe { (self.functions.config_modify)(config, name.as_ptr(), value.as_ptr()) };
            self.check("ucp_config_modify", status)?;
        }
        Ok(())
    }

    /// What this context may use.
    pub(super) fn survey(&self, context: Context) -> Survey {
        Survey {
            version: self.version_text.clone(),
            library: self.functions.library.path().display().to_string(),
            devices: devices(&self.describe(context)),
        }
    }

    /// UCX's own description of a context: it has no other way to list devices without its lower layer.
    fn describe(&self, context: Context) -> String {
        let (mut text, mut len): (*mut c_char, usize) = (ptr::null_mut(), 0);
        // SAFETY: both are written until the stream is closed, which sets them for good.
        let stream = unsafe { libc::open_memstream(&mut text, &mut len) };
        if stream.is_null() {
            return String::new();
        }
        // SAFETY: the context and the stream are open. What a memory stream has written is freed with `free`.
        unsafe {
            (self.functions.context_print_info)(context, stream);
            libc::fclose(stream);
            let described =
                String::from_utf8_lossy(std::slice::from_raw_parts(text.cast(), len)).into_owned();
            libc::free(text.cast());
            described
        }
    }
}

/// The transports with their devices, from lines such as `#      resource 1  :  md 1  dev 1  flags -- tcp/eth0`.
fn devices(description: &str) -> Vec<(String, String)> {
    let resource = |line: &str| {
        let line = line.trim_start_matches('#').trim_start();
        let (transport, device) =
            line.strip_prefix("resource")?.split_whitespace().next_back()?.split_once('/')?;
        Some((transport.to_owned(), device.to_owned()))
    };
    description.lines().filter_map(resource).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_from_the_description_of_a_context() {
        let description = "#\n# UCP context\n#\n#     component 0  :  self\n#            md 0  :  component 0  self \n#\n\
                           #      resource 0  :  md 0  dev 0  flags -- self/memory\n\
                           #      resource 12 :  md 1  dev 1  flags -s tcp/eth0\n# memory: 1MB\n";
        let expected = [("self", "memory"), ("tcp", "eth0")].map(|(a, b)| (a.to_owned(), b.to_owned()));
        assert_eq!(devices(description), expected);
        assert_eq!(devices(""), []);
        let survey = |devices: &[(String, String)]| Survey {
            version: "1.22.0".into(),
            library: "libucp.so.0".into(),
            devices: devices.to_vec(),
        };
        assert_eq!(survey(&expected).devices_on_a_line(), "self/memory, tcp/eth0");
        assert_eq!(survey(&[]).devices_on_a_line(), "none");
        assert!(survey(&expected).leaves_the_machine() && !survey(&expected[..1]).leaves_the_machine());
    }
}
