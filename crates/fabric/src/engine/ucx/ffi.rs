//! The part of libucp's interface that the engine uses, after `ucp/api/ucp.h` of version 1.22.
//!
//! UCX keeps the layout of its structures: a newer version appends fields, and a mask says which fields are valid. So these
//! declarations serve 1.13 and 1.22 alike. The sizes that are asserted here are what GCC computes from the headers of 1.22.

use std::ffi::{c_char, c_int, c_uint, c_void};

use antiphon_device::library::{Library, LibraryError, Wanted};

/// UCX.
pub(super) const UCX: Wanted = Wanted {
    what: "UCX (libucp)",
    variable: Some("ANTIPHON_UCX"),
    names: &["libucp.so.0"],
    packages: &["libucx/lib"],
    roots: &["$HPCX_UCX_DIR", "/opt/hpcx/ucx", "/opt/ucx"],
    folders: &["lib"],
    companions: None,
    install: "install libucx0, or `pip install libucx-cu13`, or set ANTIPHON_UCX to libucp.so.0",
};

/// `ucs_status_t`: 0 is success, 1 is in progress, negative numbers are errors.
pub(super) type Status = i8;
pub(super) const OK: Status = 0;
pub(super) const IN_PROGRESS: Status = 1;
pub(super) const ERR_UNREACHABLE: Status = -6;
pub(super) const ERR_BUSY: Status = -15;
/// The least number that an error has.
const ERR_LAST: isize = -100;

/// A pointer to a request, null for success, or an error.
pub(super) type StatusPointer = *mut c_void;

/// What a [`StatusPointer`] says.
pub(super) enum Outcome {
    /// The operation is complete.
    Done,
    /// It goes on, and calls back.
    Pending(*mut c_void),
    Failed(Status),
}

impl From<StatusPointer> for Outcome {
    fn from(pointer: StatusPointer) -> Self {
        match pointer.addr() as isize {
            0 => Self::Done,
            code if (ERR_LAST..0).contains(&code) => Self::Failed(code as Status),
            _ => Self::Pending(pointer),
        }
    }
}

pub(super) type Context = *mut c_void;
pub(super) type Worker = *mut c_void;
pub(super) type Endpoint = *mut c_void;
pub(super) type Config = *mut c_void;

/// `ucp_params_t`
#[repr(C)]
pub(super) struct Params {
    pub(super) field_mask: u64,
    pub(super) features: u64,
    request_size: usize,
    request_init: *const c_void,
    request_cleanup: *const c_void,
    tag_sender_mask: u64,
    mt_workers_shared: c_int,
    pub(super) estimated_num_eps: usize,
    estimated_num_ppn: usize,
    name: *const c_char,
    node_local_id: usize,
}
pub(super) const PARAM_FEATURES: u64 = 1 << 0;
pub(super) const PARAM_ESTIMATED_NUM_EPS: u64 = 1 << 6;
pub(super) const FEATURE_WAKEUP: u64 = 1 << 4;
pub(super) const FEATURE_AM: u64 = 1 << 6;

/// `ucp_worker_params_t`
#[repr(C)]
pub(super) struct WorkerParams {
    pub(super) field_mask: u64,
    pub(super) thread_mode: c_uint,
    cpu_mask: [u64; 16],
    events: c_uint,
    user_data: *mut c_void,
    event_fd: c_int,
    flags: u64,
    name: *const c_char,
    am_alignment: usize,
    client_id: u64,
}
pub(super) const WORKER_THREAD_MODE: u64 = 1 << 0;
/// One thread at a time.
pub(super) const THREAD_MODE_SERIALIZED: c_uint = 1;

pub(super) type ErrorHandler = unsafe extern "C" fn(arg: *mut c_void, endpoint: Endpoint, status: Status);

/// `ucp_ep_params_t`
#[repr(C)]
pub(super) struct EndpointParams {
    pub(super) field_mask: u64,
    pub(super) address: *const c_void,
    pub(super) err_mode: c_uint,
    pub(super) err_handler: Option<ErrorHandler>,
    pub(super) err_handler_arg: *mut c_void,
    user_data: *mut c_void,
    flags: c_uint,
    sockaddr: [usize; 2],
    conn_request: *mut c_void,
    name: *const c_char,
    local_sockaddr: [usize; 2],
}
pub(super) const EP_REMOTE_ADDRESS: u64 = 1 << 0;
pub(super) const EP_ERR_HANDLING_MODE: u64 = 1 << 1;
pub(super) const EP_ERR_HANDLER: u64 = 1 << 2;
/// Failures of the peer are not told.
pub(super) const ERR_HANDLING_MODE_NONE: c_uint = 0;
pub(super) const ERR_HANDLING_MODE_PEER: c_uint = 1;

/// `ucp_am_recv_param_t`
#[repr(C)]
pub(super) struct AmReceiveParam {
    pub(super) attributes: u64,
    reply_endpoint: Endpoint,
}
/// The data is a descriptor, with which it can be fetched.
pub(super) const AM_RECV_RNDV: u64 = 1 << 17;

pub(super) type AmHandler = unsafe extern "C" fn(
    arg: *mut c_void,
    header: *const c_void,
    header_length: usize,
    data: *mut c_void,
    length: usize,
    param: *const AmReceiveParam,
) -> Status;

/// `ucp_am_handler_param_t`
#[repr(C)]
pub(super) struct AmHandlerParam {
    pub(super) field_mask: u64,
    pub(super) id: c_uint,
    pub(super) flags: u32,
    pub(super) handler: Option<AmHandler>,
    pub(super) arg: *mut c_void,
}
pub(super) const AM_HANDLER_ALL_FIELDS: u64 = 0b1111;
/// The handler gets each message as a whole, and messages in any order.
pub(super) const AM_WHOLE_MESSAGE: u32 = 1 << 0;

/// The callback of a send, which takes no length, or of a fetch.
#[repr(C)]
pub(super) union Callback {
    pub(super) send: unsafe extern "C" fn(request: *mut c_void, status: Status, user_data: *mut c_void),
    pub(super) receive:
        unsafe extern "C" fn(request: *mut c_void, status: Status, length: usize, user_data: *mut c_void),
    none: usize,
}

/// `ucp_request_param_t`
#[repr(C)]
pub(super) struct RequestParam {
    pub(super) attributes: u32,
    pub(super) flags: u32,
    request: *mut c_void,
    pub(super) callback: Callback,
    datatype: u64,
    pub(super) user_data: *mut c_void,
    reply_buffer: *mut c_void,
    memory_type: c_uint,
    receive_info: *mut c_void,
    memory_handle: *mut c_void,
    later: [usize; 3],
}
pub(super) const OP_CALLBACK: u32 = 1 << 1;
pub(super) const OP_USER_DATA: u32 = 1 << 2;
pub(super) const OP_FLAGS: u32 = 1 << 4;
pub(super) const EP_CLOSE_FORCE: u32 = 1 << 0;

const _: () = {
    assert!(size_of::<Params>() == 88 && std::mem::offset_of!(Params, estimated_num_eps) == 56);
    assert!(size_of::<WorkerParams>() == 200 && std::mem::offset_of!(WorkerParams, thread_mode) == 8);
    assert!(size_of::<EndpointParams>() == 104 && std::mem::offset_of!(EndpointParams, err_handler) == 24);
    assert!(size_of::<AmHandlerParam>() == 32 && size_of::<AmReceiveParam>() == 16);
    assert!(size_of::<RequestParam>() == 96 && std::mem::offset_of!(RequestParam, user_data) == 32);
};

impl Params {
    pub(super) fn new(features: u64, endpoints: usize) -> Self {
        // SAFETY: zeroes are null pointers and numbers; the mask says which fields count.
        let zeroes: Self = unsafe { std::mem::zeroed() };
        let field_mask = PARAM_FEATURES | PARAM_ESTIMATED_NUM_EPS;
        Self { field_mask, features, estimated_num_eps: endpoints, ..zeroes }
    }
}

impl WorkerParams {
    pub(super) fn serialized() -> Self {
        // SAFETY: as for `Params`.
        let zeroes: Self = unsafe { std::mem::zeroed() };
        Self { field_mask: WORKER_THREAD_MODE, thread_mode: THREAD_MODE_SERIALIZED, ..zeroes }
    }
}

impl EndpointParams {
    /// An endpoint whose failure calls `handler`, in this mode.
    pub(super) fn new(
        address: *const c_void,
        err_mode: c_uint,
        handler: ErrorHandler,
        arg: *mut c_void,
    ) -> Self {
        // SAFETY: as for `Params`.
        let zeroes: Self = unsafe { std::mem::zeroed() };
        Self {
            field_mask: EP_REMOTE_ADDRESS | EP_ERR_HANDLING_MODE | EP_ERR_HANDLER,
            address,
            err_mode,
            err_handler: Some(handler),
            err_handler_arg: arg,
            ..zeroes
        }
    }
}

impl RequestParam {
    /// No fields but the flags.
    pub(super) fn with_flags(flags: u32) -> Self {
        // SAFETY: as for `Params`; the callback is none.
        let zeroes: Self = unsafe { std::mem::zeroed() };
        Self { attributes: OP_FLAGS, flags, ..zeroes }
    }

    /// A callback and what it gets.
    pub(super) fn with_callback(callback: Callback, user_data: *mut c_void) -> Self {
        Self { attributes: OP_CALLBACK | OP_USER_DATA, callback, user_data, ..Self::with_flags(0) }
    }
}

macro_rules! functions {
    ($($name:ident: $symbol:literal ($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions of libucp.
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            /// Kept open for the process, like every library.
            pub(super) library: Library,
        }

        impl Functions {
            /// Looks all functions up.
            pub(super) fn of(library: Library) -> Result<Self, LibraryError> {
                // SAFETY: these are the functions' types in ucp.h and, for the texts of codes, in ucs/type/status.h.
                Ok(unsafe { Self { $($name: library.function($symbol)?,)* library } })
            }
        }
    };
}

functions! {
    get_version: "ucp_get_version"(*mut c_uint, *mut c_uint, *mut c_uint);
    config_read: "ucp_config_read"(*const c_char, *const c_char, *mut Config) -> Status;
    config_modify: "ucp_config_modify"(Config, *const c_char, *const c_char) -> Status;
    config_release: "ucp_config_release"(Config);
    init_version: "ucp_init_version"(c_uint, c_uint, *const Params, Config, *mut Context) -> Status;
    context_print_info: "ucp_context_print_info"(Context, *mut libc::FILE);
    cleanup: "ucp_cleanup"(Context);
    worker_create: "ucp_worker_create"(Context, *const WorkerParams, *mut Worker) -> Status;
    worker_destroy: "ucp_worker_destroy"(Worker);
    worker_get_address: "ucp_worker_get_address"(Worker, *mut *mut c_void, *mut usize) -> Status;
    worker_release_address: "ucp_worker_release_address"(Worker, *mut c_void);
    worker_progress: "ucp_worker_progress"(Worker) -> c_uint;
    worker_get_efd: "ucp_worker_get_efd"(Worker, *mut c_int) -> Status;
    worker_arm: "ucp_worker_arm"(Worker) -> Status;
    worker_set_am_recv_handler: "ucp_worker_set_am_recv_handler"(Worker, *const AmHandlerParam) -> Status;
    ep_create: "ucp_ep_create"(Worker, *const EndpointParams, *mut Endpoint) -> Status;
    ep_close: "ucp_ep_close_nbx"(Endpoint, *const RequestParam) -> StatusPointer;
    am_send: "ucp_am_send_nbx"(Endpoint, c_uint, *const c_void, usize, *const c_void, usize, *const RequestParam) -> StatusPointer;
    am_recv_data: "ucp_am_recv_data_nbx"(Worker, *mut c_void, *mut c_void, usize, *const RequestParam) -> StatusPointer;
    request_check_status: "ucp_request_check_status"(*mut c_void) -> Status;
    request_free: "ucp_request_free"(*mut c_void);
    status_string: "ucs_status_string"(Status) -> *const c_char;
}
