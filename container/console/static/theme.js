// The theme, before the page is painted first: the system's, or the one that this browser keeps.

const chosen = () => {
	try {
		return localStorage.getItem("slipway.theme") ?? "";
	} catch {
		return ""; // this browser keeps nothing
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
			// It holds until the page is loaded again.
		}
	});
});
