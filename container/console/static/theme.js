// Sets the theme before the page is first painted: the theme in this browser's storage, or else the system's theme.

const chosen = () => {
	try {
		return localStorage.getItem("slipway.theme") ?? "";
	} catch {
		return ""; // The storage is off.
	}
};

document.documentElement.dataset.theme = chosen();

addEventListener("DOMContentLoaded", () => {
	const select = document.getElementById("theme");
	select.value = chosen();
	select.addEventListener("change", () => {
		document.documentElement.dataset.theme = select.value;
		try {
			localStorage.setItem("slipway.theme", select.value);
		} catch {
			// The storage is off, so the choice is lost when the page is reloaded.
		}
	});
});
